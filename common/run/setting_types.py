"""Types of settings' values, and how people may write them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from common.xtts.dims import SIZES

Positive = Annotated[int, Field(ge=1)]


def _as_text(value: Any) -> Any:
    """`data_gpu: 0` and `run: 7` are texts in a file as on the command line."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Word = Annotated[str, BeforeValidator(_as_text)]

# A file of the user's: the processes may start in another folder.
ClipPath = Annotated[str, AfterValidator(lambda path: str(Path(path).expanduser().absolute()))]


def list_of(key: str) -> BeforeValidator:
    """`data.train: a` and `data.train: [a, {path: b, language: fa}]` both mean a list; a plain
    value is the value of `key`.
    """

    def as_list(value: Any) -> Any:
        values = [] if value is None else value if isinstance(value, list) else [value]
        return [{key: v} if isinstance(v, (str, os.PathLike)) else v for v in values]

    return BeforeValidator(as_list)


def known_size(size: str) -> str:
    """The name of a size in `dims.SIZES`."""
    if size not in SIZES:
        raise PydanticCustomError(
            "size",
            f"Input should be {', '.join(map(repr, list(SIZES)[:-1]))} or {list(SIZES)[-1]!r}",
        )
    return size
