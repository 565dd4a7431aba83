"""A size of model that trains arithmetic in place of networks: importing this module registers it,
here and in child processes.

`model.size: arithmetic` is a size like others then. Child processes learn of it by
`interpreter/sitecustomize.py`, which Python imports as it starts, from the PYTHONPATH that is set
here.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from common.data.batch import FIELDS, Field
from common.run.stages import NETWORKS, register
from common.xtts.dims import SIZES

ROOT = Path(__file__).resolve().parents[2]
# batches carry so many bytes more per row, so that few rows can weigh as much as real ones
ROW_BYTES = "ARITHMETIC_ROW_BYTES"


def _register() -> None:
    load = int(os.environ.get(ROW_BYTES, "0"))
    FIELDS["arithmetic"] = (
        Field("value", "int64", "B"),
        Field("seed", "int64", "B"),
        Field("weights", "float32", "B"),
        *([Field("load", "uint8", ("B", load))] if load else []),
    )
    common = {
        "kind": "arithmetic",
        "score": "audio",
        "judged": ("loss", "eval_audio"),
        "step": "tests.support.arithmetic_step:make",
        "figures": "tests.support.arithmetic:no_figures",
        "panels": "trainer.report.panels:loss_panels",
        "needs_dvae": False,
        "speaks": False,
        "networks": False,
    }
    stages = (
        replace(
            s,
            title=f"{s.title} (arithmetic)",
            maker=f"tests.support.arithmetic_maker:{s.name}_maker",
            **common,
        )
        for s in NETWORKS
    )
    register("arithmetic", replace(SIZES["tiny"]), tuple(stages))


def no_figures(history, run, unigram_nats) -> dict:
    """None of its own."""
    return {}


def _tell_children() -> None:
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = [str(Path(__file__).parent / "interpreter"), str(ROOT)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*own, *(p for p in known if p and p not in own)])


_register()
_tell_children()
