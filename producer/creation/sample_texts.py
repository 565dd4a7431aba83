"""Check what the samples will say before a run is created: tokenise every text, read every
reference clip. No TensorFlow.
"""

from __future__ import annotations

import logging

from common.run import recognise
from common.run.settings import Config
from common.system.errors import BadInput
from common.xtts.clips import MIN_SECONDS, ReferenceClipError, load_reference
from common.xtts.text.errors import LanguageUnavailable
from common.xtts.text.split import pieces
from common.xtts.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def check_samples(config: Config, tokenizer: Tokenizer, most_tokens: int) -> None:
    """BadInput, naming the setting: the vocabulary cannot say a text, or a clip cannot be read or
    is too short for a voice.

    Args:
        most_tokens: the model's limit for one text; longer texts are spoken in pieces.
    """
    samples = config.samples
    check_judge(config)
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


def check_judge(config: Config) -> None:
    """BadInput: `samples.recogniser` cannot listen here, or `train.best_by` names what nobody
    measures.
    """
    named, by = config.samples.recogniser, config.train.best_by
    recognise.check(named)
    if by == "audio_ce":
        return
    if not config.sample_every or not config.samples.count:
        raise BadInput(
            f"train.best_by={by} is measured on samples, and none are made: set samples.every and"
            " samples.count"
        )
    if by == "cer" and named is None:
        raise BadInput(
            "train.best_by=cer needs somebody who listens: set samples.recogniser to pocketsphinx"
            " (English) or to a folder with a faster-whisper model"
        )
    if by == "similarity" and config.model.weights is None:
        raise BadInput(
            "train.best_by=similarity needs the speaker encoder of imported weights: set"
            " model.weights, or another train.best_by"
        )
