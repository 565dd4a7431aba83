"""How a GPT is born and trained, beside its sizes.

Named as in the settings, and passed on whole.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GptOptions:
    """Defaults are XTTS's recipe, except for `parity_init`."""

    parity_init: bool = False  # token embeddings N(0, 1) instead of N(0, 0.02)
    dropout: float | None = None  # None: the model's
    attention_dropout: float | None = None  # of the attention probabilities; None: as dropout
    code_dropout: float = 0.0  # share of the audio codes that are hidden from the model as inputs
    recompute: bool = (
        False  # blocks again in the backward pass instead of their activations in memory
    )
