"""What the samples will say, tried before a run is created: every text tokenised, every reference
clip read. No TensorFlow.
"""

from __future__ import annotations

import logging

from common.run.settings import Config
from common.system.errors import BadInput
from common.xtts.clips import MIN_SECONDS, ReferenceClipError, load_reference
from common.xtts.text.errors import LanguageUnavailable
from common.xtts.text.split import pieces
from common.xtts.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def check_samples(config: Config, tokenizer: Tokenizer, most_tokens: int) -> None:
    """BadInput names the setting: a text that the vocabulary cannot say, a clip that cannot be read
    or is too short for a voice.

    Args:
        most_tokens: of one text, in the model; longer ones are spoken in pieces.
    """
    samples = config.samples
    for i, text in enumerate(samples.texts):
        try:
            pieces(tokenizer, text.text, text.language or config.data.language, most_tokens)
        except (ValueError, LanguageUnavailable) as e:
            raise BadInput(
                f"samples.texts[{i}] ({text.text[:40]!r}) cannot be spoken: {e}. Change the text,"
                " or name its language: samples.texts='[{text: …, language: de}]'"
            ) from e
    named = {f"samples.references[{i}]": path for i, path in enumerate(samples.references)}
    named |= {
        f"samples.texts[{i}].reference": text.reference
        for i, text in enumerate(samples.texts)
        if text.reference is not None
    }
    for key, path in named.items():
        try:
            rate = config.dims.audio.sample_rate
            seconds = load_reference(path, rate, config.data.treatment).seconds
        except ReferenceClipError as e:
            raise BadInput(
                f"{key}: {e}; name a recording of 3 s or more (WAV, FLAC, MP3, OGG)"
            ) from e
        if seconds < MIN_SECONDS:
            raise BadInput(
                f"{key}: {path} is {seconds:.2f} s long; a voice needs {MIN_SECONDS} s at least, 3"
                " s or more are good"
            )
    if samples.every and samples.every % config.train.save_every:
        log.warning(
            "samples.every=%d is no multiple of train.save_every=%d: samples are made of the first"
            " checkpoint at or after each multiple",
            samples.every,
            config.train.save_every,
        )
