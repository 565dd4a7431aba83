"""Which part of the pipeline is the slowest, and which setting changes that.

A pure function of measured numbers.

The pipeline is a row of things that work at the same time: decode threads → each producer's own
thread (read, pack, serialise) and its device (codes, mel) → the wire → the trainer's feed (check,
transfer) → the step. At its pace, the slowest is busy all the time and the others wait: for leases
before it, for data behind it. If nobody is busy all the time, the wire is slow, or too few batches
are under way to keep them at work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

READY = 0.01  # the trainer waits for less than this share of its time: it has what it can use
IDLE = 0.85  # a part that is busy for less than this share is not what the others wait for
# unless it is that much busier than the next one: then what is missing was only not measured
AHEAD = 1.25
DECODE_WAIT = (
    0.08  # a producer that waits for its decode threads for more than this share of its time
)
LEASE_WAIT = 0.05  # a producer that waits for leases for less than this share of its time has them
HEADROOM = 1.05  # producers are counted with so much to spare
HOST_PARTS = ("read", "pack", "serialise")  # of a producer's own thread
DEVICE_PARTS = ("codes", "mel", "make")  # of the thread that has its device
OWN_PARTS = ("read", "codes", "mel", "pack", "serialise", "make")
CAUSES = (
    "trainer",
    "transfer",
    "transport",
    "window",
    "leases",
    "decode",
    "features",
    "read",
    "serialise",
    "producers",
)
_CAUSE_OF = {
    "read": "read",
    "codes": "features",
    "mel": "features",
    "make": "features",
    "pack": "serialise",
    "serialise": "serialise",
}


@dataclass(frozen=True)
class ProducerLoad:
    """One producer over a stretch of batches, in seconds per batch.

    `parts_s`: OWN_PARTS; `decode_wait`, `device_wait`, `lease_wait` (its own thread waits for its
    decode threads, its device, a lease), `idle` (no trainer); and `decode` and `resample`, which
    are summed over the decode threads.
    """

    name: str
    batches: int
    parts_s: Mapping[str, float]
    threads: int = 1
    clips: float = 1.0
    cached: float = 0.0  # share of the clips whose codes were known already

    def part(self, *names: str) -> float:
        """Seconds per batch of some parts together."""
        return sum(self.parts_s.get(n, 0.0) for n in names)

    @property
    def own_s(self) -> float:
        """Pace of its own thread and its device, which work at the same time."""
        return max(self.part(*HOST_PARTS), self.part(*DEVICE_PARTS))

    def decode_s(self, leases: int) -> float:
        """Pace of its decode threads: as many work at once as there are clips in hand."""
        return self.part("decode", "resample") / max(
            1, min(self.threads, math.ceil(self.clips * leases))
        )

    @property
    def cycle_s(self) -> float:
        """From batch to batch."""
        return self.part(*HOST_PARTS, "decode_wait", "device_wait", "lease_wait", "idle")

    def pace_s(self, leases: int) -> float:
        """Seconds per batch if it never waited for a lease."""
        return max(self.own_s, self.decode_s(leases))


@dataclass(frozen=True)
class Settings:
    """What the user can change, as it is now."""

    leases: int = 3
    high_water_mark: int = 8
    mel_dtype: str = "float16"
    bind: str = "ipc"
    cache_codes: bool = True
    producers_on: str = "gpu"  # or "cpu"
    cores: int = 1


@dataclass(frozen=True)
class Measured:
    """A stretch of training, in seconds per batch.

    `batch_s` by the clock; `wait_s` of it the device had nothing to do for want of data; `feed_s`
    the feed's work (check, transfer); `transit_s` from a producer's send to the feed, of batches
    that were waited for (None: none was); `trainer_s` the step's parts.
    """

    batch_s: float
    wait_s: float
    feed_s: float = 0.0
    transit_s: float | None = None
    trainer_s: Mapping[str, float] = field(default_factory=dict)
    producers: tuple[ProducerLoad, ...] = ()
    settings: Settings = field(default_factory=Settings)
    ceiling_s: float | None = (
        None  # measured with data always there; None: what is left of batch_s without the waits
    )

    @property
    def wait(self) -> float:
        """Share of the time that the device waits for data."""
        return self.wait_s / self.batch_s if self.batch_s else 0.0

    @property
    def ceiling(self) -> float:
        """Batches per second if data were always there."""
        return 1 / max(
            1e-9, self.batch_s - self.wait_s if self.ceiling_s is None else self.ceiling_s
        )

    @property
    def made_per_s(self) -> float:
        """Batches per second that the producers could make if they never waited for leases."""
        return sum(1 / max(1e-9, p.pace_s(self.settings.leases)) for p in self.producers)

    @property
    def producers_needed(self) -> int:
        """How many such producers would keep the trainer busy; 0 if none was measured."""
        if not self.producers:
            return 0
        each = self.made_per_s / len(self.producers)
        return max(1, math.ceil(HEADROOM * self.ceiling / each - 1e-6))


@dataclass(frozen=True)
class Verdict:
    """`cause` is one of CAUSES, `part` the largest part within it, `setting` what to change,
    `sentence` all of it in words.
    """

    cause: str
    part: str
    setting: str
    sentence: str


def verdict(m: Measured) -> Verdict:
    """Name the bottleneck. Times that were not measured count as 0."""
    cause, part = _cause(m)
    setting = _setting(m, cause, part)
    name = cause if part in ("", cause) else f"{cause} ({part})"
    wait = f"the trainer waits for data {100 * m.wait:.1f} % of the time"
    ceiling = f"{m.ceiling:.2f} batches/s if data were always there"
    if cause == "trainer":
        n = len(m.producers)
        supply = (
            f"; {n} producer{'s' * (n != 1)} could make {m.made_per_s:.2f}/s, {m.producers_needed}"
            " needed"
            if n
            else ""
        )
        sentence = (
            f"the bottleneck is the trainer ({part or 'step'}): {ceiling}, {wait}{supply};"
            f" {setting}"
        )
    else:
        needed = (
            f"; {m.producers_needed} such producers are needed"
            if m.producers_needed > len(m.producers)
            else ""
        )
        sentence = f"the bottleneck is {name}: {wait}; ceiling {ceiling}{needed}; {setting}"
    return Verdict(cause, part, setting, sentence)


def _cause(m: Measured) -> tuple[str, str]:
    if m.wait <= READY:
        return "trainer", _largest(m.trainer_s)
    if not m.producers:
        return "producers", ""
    total = max(1e-9, sum(p.batches * p.cycle_s for p in m.producers))
    # Not what is left without the waits for leases: a producer with one batch in hand waits for its
    # clips though it could do more.
    producer = sum(p.batches * p.pace_s(m.settings.leases) for p in m.producers) / total
    busy = {"trainer": 1 - m.wait, "transfer": m.feed_s / m.batch_s, "producer": producer}
    most = max(busy, key=lambda k: (min(1.0, busy[k]), k == "producer"))
    others = max(v for k, v in busy.items() if k != most)
    # The trainer's wait is measured: it is not what the others wait for, whatever they do
    # meanwhile.
    if busy[most] < IDLE and (most == "trainer" or _slow_wire(m) or busy[most] < AHEAD * others):
        return _between(m, sum(p.batches * p.part("lease_wait") for p in m.producers) / total), ""
    if most == "trainer":
        return "trainer", _largest(m.trainer_s)
    return (most, "") if most == "transfer" else _within_producers(m)


def _between(m: Measured, lease_wait: float) -> str:
    """Nobody is busy all the time."""
    if _slow_wire(m):
        return "transport"
    in_hand = m.settings.leases * len(m.producers)
    return (
        "leases" if lease_wait < LEASE_WAIT and in_hand < m.settings.high_water_mark else "window"
    )


def _slow_wire(m: Measured) -> bool:
    """The wire holds what it has not carried yet; where it is free, a batch is there at once."""
    return m.transit_s is not None and m.transit_s > 0.5 * m.batch_s


def _within_producers(m: Measured) -> tuple[str, str]:
    """Decoding, or the largest part of the producers' own threads or their devices, whichever are
    slower.
    """
    count = sum(p.batches for p in m.producers)
    parts = (*OWN_PARTS, "decode", "resample", "decode_wait", "device_wait")
    mean = {n: sum(p.batches * p.part(n) for p in m.producers) / count for n in parts}
    host, device = (sum(mean[n] for n in of) for of in (HOST_PARTS, DEVICE_PARTS))
    own = max(host, device)
    decode = sum(p.batches * p.decode_s(m.settings.leases) for p in m.producers) / count
    waits = mean["decode_wait"] / max(1e-9, host + mean["device_wait"] + mean["decode_wait"])
    if decode > own or (waits > DECODE_WAIT and decode > 0.8 * own):
        return "decode", "resample" if mean["resample"] > mean["decode"] else "decode"
    part = _largest({n: mean[n] for n in (HOST_PARTS if host > device else DEVICE_PARTS)})
    return _CAUSE_OF.get(part, "features"), part


def _largest(parts: Mapping[str, float]) -> str:
    return max(parts, key=parts.__getitem__) if parts else ""


def _setting(m: Measured, cause: str, part: str) -> str:
    s, n = m.settings, max(1, len(m.producers))
    more = f"--num-producers {max(n + 1, m.producers_needed)}"
    threads = max((p.threads for p in m.producers), default=1)
    cached = min((p.cached for p in m.producers), default=0.0)
    if cause == "decode":
        later = (
            " (less from the second epoch on: only conditioning clips are decoded then)"
            if s.cache_codes and cached < 0.5
            else ""
        )
        convert = ", or clips converted to 22 050 Hz once" if part == "resample" else ""
        if threads < s.cores // n:
            return (
                f"set producers.decode_threads={min(s.cores // n, 2 * threads)} (now"
                f" {threads}){convert}{later}"
            )
        return (
            f"{n * threads} threads decode on {s.cores} cores already; add a producer on another"
            f" host{convert}{later}"
        )
    if cause == "features":
        gpu = f"--data-gpu to a GPU, or {more}" if s.producers_on == "cpu" else more
        return f"set {gpu}" + (
            ", or producers.cache_codes=true" if part == "codes" and not s.cache_codes else ""
        )
    smaller = "set transport.mel_dtype=float16" if s.mel_dtype != "float16" else ""
    return {
        "trainer": _trainer_setting(part),
        "transfer": smaller or "set a smaller batching.batch_size",
        "transport": (
            smaller
            or (
                "set producers on this host (transport.bind=ipc)"
                if s.bind != "ipc"
                else f"set {more}"
            )
        ),
        "leases": f"set producers.leases={s.leases + 2} (now {s.leases})",
        "window": (
            f"set transport.high_water_mark={2 * s.high_water_mark} (now {s.high_water_mark})"
        ),
        "read": f"set {more}, or the run folder on a faster disk",
        "serialise": f"set {more}",
        "producers": (
            "no producer works: see RUN/logs/producer-*.log, or `launch.py producer --run RUN`"
        ),
    }[cause]


def _trainer_setting(part: str) -> str:
    return {
        "checkpoint": "set train.save_every higher",
        "logging": "set train.log_every higher",
    }.get(part, "only a faster step gives more (batching.batch_size, batching.buckets)")
