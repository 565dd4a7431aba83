"""The test's side of `trainer.gate`: how far a run may go, and where it is waiting."""

from __future__ import annotations

from pathlib import Path

from common.system.files import write_atomically
from trainer.gate import GATE

LAG = 2  # the ledger has step s once step s + LAG was trained, as metrics are read that late


class Gate:
    """A gate in `folder`; open at first."""

    def __init__(self, folder: Path):
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.env = {GATE: str(folder)}

    def limit(self, stage: int, step: int) -> None:
        """No step after this one begins."""
        write_atomically(self._folder / "limit", f"{stage} {step}")

    def open(self) -> None:
        """The run may go to its end."""
        for file in self._folder.iterdir():
            file.unlink()

    def hold(self, phase: str) -> None:
        """Hold the run in the next evaluation ("evaluating") or save ("saving")."""
        (self._folder / f"{phase}.held").unlink(missing_ok=True)
        (self._folder / phase).touch()

    def holds(self, phase: str) -> bool:
        """Whether the run is waiting there."""
        return (self._folder / f"{phase}.held").exists()

    def release(self, phase: str) -> None:
        """Let the evaluation or the save go on."""
        (self._folder / phase).unlink()
