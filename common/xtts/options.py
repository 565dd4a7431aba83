"""How a GPT is initialised and trained: all options but its sizes, named as in the settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GptOptions:
    """Defaults are XTTS's recipe, except for `parity_init`."""

    parity_init: bool = False  # token embeddings N(0, 1) instead of N(0, 0.02)
    dropout: float | None = None  # None: the model's
    attention_dropout: float | None = None  # of the attention probabilities; None: as dropout
    code_dropout: float = 0.0  # share of the input audio codes hidden from the model
    recompute: bool = (
        False  # run blocks again in the backward pass instead of keeping their activations
    )
