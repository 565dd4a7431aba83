"""The pickle of a tree of tensors, written opcode by opcode: what torch.save writes, without its
classes at hand.

Protocol 2, the names and the order of arguments that torch.load (weights_only=True included)
expects.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

_STORAGE_OF = {
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "float16": "HalfStorage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
}


def describe_tensors(tree: Any) -> tuple[bytes, list]:
    """The bytes of data.pkl, and the tensors in the order of their storages 0, 1, …

    A leaf with `shape` and `dtype` is a tensor with a storage of its own, contiguous. TypeError: a
    leaf of no known kind.
    """
    tensors: list = []
    return b"\x80\x02" + _value(tree, tensors, "") + b".", tensors


def _value(value: Any, tensors: list, where: str) -> bytes:
    if isinstance(value, Mapping):
        items = b"".join(
            _text(key) + _value(item, tensors, f"{where}.{key}" if where else key)
            for key, item in value.items()
        )
        return b"}(" + items + b"u"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        tensors.append(value)
        return _tensor(len(tensors) - 1, np.dtype(value.dtype), tuple(value.shape), where)
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, (list, tuple)):
        return (
            b"]("
            + b"".join(_value(item, tensors, f"{where}[{i}]") for i, item in enumerate(value))
            + b"e"
        )
    raise TypeError(f"{where}: a {type(value).__name__} cannot be written into a checkpoint")


def _tensor(index: int, dtype: np.dtype, shape: tuple[int, ...], where: str) -> bytes:
    if dtype.name not in _STORAGE_OF:
        raise TypeError(f"{where}: PyTorch has no storage for {dtype.name}")
    numel = int(np.prod(shape, dtype=np.int64))
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    storage = (
        b"("
        + _text("storage")
        + _name("torch", _STORAGE_OF[dtype.name])
        + _text(str(index))
        + _text("cpu")
        + _integer(numel)
        + b"tQ"
    )
    hooks = _name("collections", "OrderedDict") + b")R"
    arguments = (
        storage + _integer(0) + _integers(shape) + _integers(strides[::-1]) + b"\x89" + hooks
    )
    return _name("torch._utils", "_rebuild_tensor_v2") + b"(" + arguments + b"tR"


def _name(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    if not isinstance(text, str):
        raise TypeError(f"keys of a checkpoint are texts, not {type(text).__name__}")
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _integer(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def _integers(values) -> bytes:
    return b"(" + b"".join(map(_integer, values)) + b"t"
