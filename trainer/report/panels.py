"""The curves of each stage, as panels for curves.png and for the page."""

from __future__ import annotations

from trainer.report import quality
from trainer.report.pictures import Curve, Level, Panel
from trainer.report.summary import History


def _curve(history: History, label: str, name: str, evaluated: bool = False) -> Curve:
    return Curve(label, *history.series(name, evaluated), rough=not evaluated)


def dvae_panels(history: History, figures: dict) -> list[Panel]:
    """Stage 1's curves."""
    baseline = (
        [Level("predicting the mean mel", figures["mean_mel_error"])]
        if figures["mean_mel_error"]
        else []
    )
    error = [
        _curve(history, "training", "recon"),
        _curve(history, "held out", "eval_recon", evaluated=True),
    ]
    used = [  # both of a batch: an average over batches would use more codes by itself
        _curve(history, "training", "perplexity"),
        _curve(history, "held out", "eval_perplexity", True),
    ]
    return [
        Panel(
            "Stage 1, DVAE: reconstruction error",
            error,
            "mean squared error, log-mel / stats",
            baseline,
        ),
        Panel(
            "Stage 1, DVAE: perplexity of a batch's codes",
            used,
            f"codes in use, of {figures['num_codes']}",
        ),
    ]


def gpt_panels(history: History, figures: dict) -> list[Panel]:
    """Stage 2's curves."""
    unigram = (
        [Level("unigram entropy, held out", figures["unigram_entropy"])]
        if figures["unigram_entropy"]
        else []
    )
    audio = [
        _curve(history, "training", "audio_ce"),
        _curve(history, "held out", "eval_audio", evaluated=True),
    ]
    text = [
        _curve(history, "training", "text_ce"),
        _curve(history, "held out", "eval_text", evaluated=True),
    ]
    return [
        Panel("Stage 2, GPT: audio codes", audio, "cross-entropy, nats per code", unigram),
        Panel("Stage 2, GPT: text tokens", text, "cross-entropy, nats per token"),
        *quality.panels(history.quality),
    ]


def loss_panels(history: History, figures: dict) -> list[Panel]:
    """The curve of a stage without panels of its own."""
    return [
        Panel(
            figures["title"],
            [_curve(history, "training", "loss"), _curve(history, "held out", "eval_audio", True)],
            "loss",
        )
    ]
