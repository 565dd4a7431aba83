"""Clips embedded in a page: a few seconds of MP3 in the text of a link."""

from __future__ import annotations

import base64
import io

import soundfile

from common.audio.errors import DecodeError
from common.data.manifest import Utterance
from producer.batches.decode import SAMPLE_RATE, decode

MOST_S = 20.0  # of a clip


def as_link(utterance: Utterance) -> tuple[str, str]:
    """(a `data:` link to the utterance's sound, mono at 22 050 Hz; why there is none).

    One of them is empty. The sound is as training hears it.
    """
    try:
        wave = decode(utterance.path, portion=utterance.portion)
    except DecodeError as e:
        return "", e.reason
    held = io.BytesIO()
    soundfile.write(held, wave[: round(MOST_S * SAMPLE_RATE)], SAMPLE_RATE, format="MP3")
    return "data:audio/mpeg;base64," + base64.b64encode(held.getvalue()).decode(), ""
