"""What several trainers pay to add up their gradients: measured before step 1, told by
`launch.py profile`.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from common.system.documents import read_json
from common.system.errors import BadInput
from common.system.files import write_atomically

FILE = "sum.json"
LITTLE = 0.05  # of a step; what a sum may take


@dataclass(frozen=True)
class SumCost:
    """A sum by itself, while nothing else is computed.

    Attributes:
        trainers: how many added up.
        dtype: in which gradients travelled.
        num_bytes: of one trainer's gradients in it.
        seconds: of the fastest sum of some.
    """

    trainers: int
    dtype: str
    num_bytes: int
    seconds: float

    def __str__(self) -> str:
        gb = self.num_bytes / 1e9
        size = f"{gb:.2f} GB" if gb >= 0.1 else f"{1e3 * gb:.1f} MB"
        return (
            f"{self.trainers} trainers add up {size} of gradients ({self.dtype}) in"
            f" {1e3 * self.seconds:.1f} ms: {gb / self.seconds:.1f} GB/s"
        )

    def share(self, accumulate: int, batch_s: float, update_s: float) -> float:
        """The sum's part of a step of `accumulate` batches, whose trainers take `batch_s` each for
        a batch, and `update_s` for the update.
        """
        step_s = self.seconds + update_s + batch_s * accumulate / self.trainers
        return self.seconds / step_s

    def enough(self, batch_s: float, update_s: float) -> int:
        """The smallest `train.accumulate` with which the sum takes less than LITTLE of a step."""
        accumulate = self.trainers
        while self.share(accumulate, batch_s, update_s) >= LITTLE:
            accumulate += self.trainers
        return accumulate

    def advice(self, accumulate: int, batch_s: float, update_s: float) -> str:
        """All of it, as a sentence."""
        return (
            f"{self}; {100 * self.share(accumulate, batch_s, update_s):.1f} % of a step of"
            f" train.accumulate={accumulate}, less than {100 * LITTLE:.0f} % from"
            f" train.accumulate={self.enough(batch_s, update_s)} on"
        )

    def write(self, run: Path) -> None:
        """Keep it in a run's folder."""
        write_atomically(run / FILE, json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, run: Path) -> SumCost | None:
        """A run's; None: it has not been measured. BadInput: the file is damaged."""
        path = run / FILE
        try:
            cost = cls(**read_json(path))
            positive = cost.trainers > 1 and cost.num_bytes > 0 and cost.seconds > 0
        except FileNotFoundError:
            return None
        except (OSError, TypeError, ValueError) as e:
            raise BadInput(f"{path} cannot be read ({e}): {_MEND}") from e
        if not positive:
            raise BadInput(f"{path} holds no measurement: {_MEND}")
        return cost


_MEND = "delete it; the next start with several trainers measures again"
