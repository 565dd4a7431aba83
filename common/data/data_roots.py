"""Where the sources of a manifest lie on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from common.system.errors import BadInput

Roots = Sequence[str | os.PathLike] | str | os.PathLike | None


def remap(roots: list[Path], data_roots: Roots) -> list[Path]:
    if data_roots is None:
        return roots
    given = (
        [Path(data_roots)]
        if isinstance(data_roots, (str, os.PathLike))
        else [Path(r) for r in data_roots]
    )
    old = list(dict.fromkeys(roots))  # two metadata files in one folder are two sources
    named = ", ".join(map(str, old))
    if len(given) == 1 and len(old) > 1:
        given = [given[0] / root.name for root in old]
        if len(set(given)) < len(old):
            raise BadInput(
                f"one data root for folders of the same name ({named}); give one each, in this"
                " order"
            )
    if len(given) != len(old):
        raise BadInput(
            f"{len(given)} data roots for {len(old)} sources: {named}; give one each, in this order"
        )
    missing = [str(g) for g in given if not g.is_dir()]
    if missing:
        raise BadInput(f"no such data folder: {', '.join(missing)}")
    new = dict(zip(old, (Path(os.path.abspath(g)) for g in given), strict=True))
    return [new[root] for root in roots]
