"""Settings for `launch.py finetune`, with the reason for each: derived from the scan, the card, and
what the run starts from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.gpu.choose import Device
from common.system.counted import counted
from common.system.errors import BadInput

RECIPE = 252  # utterances per step, in XTTS's own recipe; its learning rate belongs to it
BUCKETS = 8
BATCHES_A_BUCKET = 4  # with fewer, short batches cost more than padding
FEW_HOURS = 10.0  # below this, a model from nothing memorises the recordings before it can read
SHORT_S = 6.0  # a conditioning cut of 3 to 6 s of the clip itself would leave little to learn
LOOKS = 20  # evaluations and checkpoints in a run
PATIENCE = 5  # of them in a row
# Memory of the step at XTTS's size: GB without rows, and GB per row, fitted to measurements
# (docs/memory.md).
PLAIN, RECOMPUTED = (7.4, 0.43), (6.4, 0.119)
DRIVER_GB = 1.5
FEWEST_PLAIN = 28  # rows; where fewer fit, recomputing blocks is faster
# Epochs by hours: (below so many hours, epochs).
EPOCHS = ((0.5, 60), (2.0, 40), (10.0, 20), (float("inf"), 10))


@dataclass(frozen=True)
class Choice:
    """Settings chosen together, and why."""

    settings: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Found:
    """What decides: the clips to train on, hours, a typical clip's seconds, characters."""

    clips: int
    hours: float
    median_s: float
    characters: int

    @classmethod
    def of(cls, scan: dict) -> Found:
        """Built from the output of `scan --json`."""
        characters = {c for of in scan["alphabet"].values() for c in of}
        median = scan["histograms"].get("seconds", {}).get("median", 0.0)
        return cls(scan["train"], scan["hours"], median, len(characters))


def choose(
    found: Found, trainer: Device, shared: bool, begins: bool, new_language: bool
) -> tuple[str, list[Choice]]:
    """(name of the file in configs/, further settings).

    Args:
        shared: the producers use the trainer's card too.
        begins: whether the run starts from weights; else from nothing.
        new_language: whether the weights' vocabulary lacks the language.
    """
    base, chosen = (
        ("finetune_xtts", _tuning(found, trainer, shared, new_language))
        if begins
        else _from_nothing(found, trainer)
    )
    return base, [*chosen, *_for_any(found)]


def _for_any(found: Found) -> list[Choice]:
    held = min(0.1, max(0.01, 8 / max(1, found.clips)))
    chosen = [
        Choice(
            (f"data.eval_fraction={held:.3g}",),
            counted(
                max(1, round(held * found.clips)), "{n} [clip is|clips are] held out to judge by"
            ),
        )
    ]
    if found.median_s < SHORT_S:
        why = (
            f"half of the clips are shorter than {found.median_s:.1f} s: a conditioning clip cut"
            " from them would hide most of them from the loss"
        )
        chosen.append(Choice(("batching.prompt=speaker",), why))
    return chosen


# -- with weights ----------------------------------------------------------------------------------


def _tuning(found: Found, trainer: Device, shared: bool, new_language: bool) -> list[Choice]:
    rows, recompute, why = _rows_that_fit(trainer, shared)
    most = max(1, min(rows, found.clips // BATCHES_A_BUCKET))
    batch = max(n for n in range(1, most + 1) if RECIPE % n == 0)
    accumulate = RECIPE // batch
    chosen = [
        Choice(
            (f"batching.batch_size={batch}", *(["train.recompute=true"] if recompute else [])),
            why if batch == rows else f"{found.clips} clips make at least four batches then",
        ),
        Choice(
            (f"train.accumulate={accumulate}",), f"{RECIPE} utterances a step, as in XTTS's recipe"
        ),
        _buckets(found.clips, batch),
    ]
    per_epoch = max(1, math.ceil(math.ceil(found.clips / batch) / accumulate))
    epochs = next(n for below, n in EPOCHS if found.hours < below) * (2 if new_language else 1)
    doubled = ", twice as often for a new language" if new_language else ""
    every = max(1, per_epoch * epochs // LOOKS)
    return [
        *chosen,
        Choice(
            (f"train.epochs={epochs}",),
            f"a rule of thumb for {hours(found.hours)}{doubled}: {per_epoch * epochs} steps at"
            " most; the best checkpoint by the held-out clips is what counts",
        ),
        _looks(every),
        Choice(
            (f"train.patience={PATIENCE}",),
            f"{PATIENCE} of them in a row without a better one end it: from there on the clips are"
            " learnt by heart",
        ),
    ]


def _rows_that_fit(trainer: Device, shared: bool) -> tuple[int, bool, str]:
    """(rows at once, whether blocks are recomputed, why)."""
    if trainer.gpu is None:
        if trainer.kind == "cpu":
            return 4, False, "no GPU: few rows at once keep a CPU's caches busy enough"
        return 12, False, "the card's memory is unknown: as in configs/finetune_xtts.yaml"
    total = trainer.gpu.memory_mb / 1024
    usable = (total - DRIVER_GB) * (5 / 6 if shared else 1)
    fit = [int(0.95 * (usable - fixed) / row) for fixed, row in (PLAIN, RECOMPUTED)]
    if fit[1] < 1:
        raise BadInput(
            f"{trainer.gpu.name} has {total:.0f} GB: XTTS's weights, gradients and moments alone"
            " take 7.1 GB (docs/memory.md); take a larger card, or --model-gpu cpu to try it"
        )
    recompute = fit[0] < FEWEST_PLAIN
    rows = max([n for n in range(1, 127) if RECIPE % n == 0 and n <= fit[recompute]], default=1)
    beside = ", shared with the producer" if shared else ""
    again = ", with blocks recomputed in the backward pass" if recompute else ""
    return rows, recompute, f"{trainer.gpu.name}, {total:.0f} GB{beside}: what fits{again}"


# -- from nothing ----------------------------------------------------------------------------------


def _from_nothing(found: Found, trainer: Device) -> tuple[str, list[Choice]]:
    if trainer.kind == "cpu":
        why = "the only size for a CPU: enough to hear that everything works, no more"
        batch = max(1, min(8, found.clips // BATCHES_A_BUCKET))
        return "demo", [
            Choice(("model.size=tiny", f"batching.batch_size={batch}"), why),
            _buckets(found.clips, batch),
        ]
    batch = max(1, min(32, found.clips // BATCHES_A_BUCKET))
    sizes = Choice(
        ("model.size=small", f"batching.batch_size={batch}"),
        "the size that was measured from nothing (docs/measured.md)",
    )
    if found.hours >= FEW_HOURS:
        return "ljspeech", [sizes, _buckets(found.clips, batch)]
    return "speech", [
        sizes,
        Choice(("data.max_audio_s=11.6",), "XTTS's own limit, instead of the measured corpus's"),
        Choice(
            (f"text.vocab_size={max(96, found.characters + 64)}", "samples.count=4"),
            f"little more than the {found.characters} characters: every token is met often",
        ),
    ]


# -- what both share -------------------------------------------------------------------------------


def _buckets(clips: int, batch: int) -> Choice:
    number = max(1, min(BUCKETS, clips // (BATCHES_A_BUCKET * batch)))
    return Choice((f"batching.buckets={number}",), "four batches or more in each")


def _looks(every: int) -> Choice:
    return Choice(
        (
            f"train.eval_every={every}",
            "train.eval_at_epoch_end=false",
            f"train.save_every={every}",
            f"samples.every={every}",
        ),
        f"it is evaluated, saved and sampled {LOOKS} times in all",
    )


def promise(found: Found, trainer: Device, begins: bool, new_language: bool) -> list[str]:
    """What to expect from so many hours, in honest lines."""
    have = f"{found.clips} clips, {hours(found.hours)}"
    if begins:
        lines = [f"{have}: the weights bring the speech, your recordings the voice."]
        if new_language:
            lines.append(
                "The language is new to these weights: they have to learn it from your recordings"
                " alone. How many hours that takes was not measured; minutes are too few."
            )
        if trainer.kind == "cpu":
            lines.append("There is no GPU: at XTTS's size a CPU is too slow to get anywhere.")
        return lines
    lines = [f"{have}, from nothing: the model has to learn all of speech from them."]
    if trainer.kind == "cpu":
        lines.append("On a CPU the tiny size is trained: it babbles, and shows that all works.")
    elif found.hours < 1:
        lines.append("Expect babble in the voice's tone. Start from weights (docs/fine-tuning.md).")
    elif found.hours < FEW_HOURS:
        lines.append(
            "After 2.3 h of one synthetic voice, 25 to 27 % of the words were misunderstood; of the"
            " recordings themselves, 22 % (docs/measured.md). A real voice is harder."
        )
    else:
        lines.append(
            "9 h of a synthetic voice gave 1.42 times the recordings' own word error rate, 37 h"
            " 1.19 times (docs/measured.md); a real voice is harder."
        )
    lines.append(
        "Without weights there is no vocoder: the voice sounds metallic (Griffin-Lim), and no"
        " folder for Coqui can be written."
    )
    return lines


def hours(value: float) -> str:
    """Hours in words; minutes or seconds where they are few."""
    return (
        f"{value:.1f} h"
        if value >= 1
        else f"{value * 60:.0f} min"
        if value >= 1 / 60
        else (f"{value * 3600:.0f} s")
    )
