"""The pickle of a checkpoint, read opcode by opcode: a tree of plain containers, with tensors and
inert objects as leaves. Nothing is imported, called or compared on the file's word.

Python's own unpickler is not used for it: names can be kept from it, but not the rest. A memo index
of 2^31 makes it ask for gigabytes, a tuple that holds itself twice, fifty times over, is hashed for
ever, and a state may be set on any object that lies on its stack. Here each opcode costs, keys are
texts or numbers, and states are kept by objects of the file's own alone.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

# bfloat16 has no NumPy dtype: it is read as float32, which holds each of its values.
STORAGES = {
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "<i1",
    "ByteStorage": "<u1",
    "BoolStorage": "?",
}
MOST_BYTES = 16 << 20
MOST_WORK = 400_000  # opcodes and copied items; a trainer's XTTS, optimizer included, has 130 000
_MOST_BITS = 128  # of an integer: the state of a random generator
# Modules whose objects sit beside the weights in Coqui's files. They are read as `Opaque`.
_INERT_PACKAGES = ("TTS", "trainer", "coqpit")
_INERT_NAMES = {
    *(
        (module, name)
        for module in ("numpy.core.multiarray", "numpy._core.multiarray")
        for name in ("scalar", "_reconstruct")
    ),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("_codecs", "encode"),
    *(
        (module, name)
        for module in ("pathlib", "pathlib._local")  # the latter by Python 3.13
        for name in ("PosixPath", "WindowsPath")
    ),
    ("collections", "defaultdict"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    *(("torch", name) for name in ("float32", "float64", "float16", "bfloat16", "int64", "int32")),
    *(("torch", name) for name in STORAGES),
    *(
        (module, name)
        for module in ("builtins", "__builtin__")
        for name in ("set", "list", "dict", "object", "int", "float", "complex")
    ),
}
_RECONSTRUCTORS = (("copyreg", "_reconstructor"), ("copy_reg", "_reconstructor"))
_KNOWN = {
    ("collections", "OrderedDict"),
    ("collections", "Counter"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch", "Size"),
    *_RECONSTRUCTORS,
}


class PickleFault(ValueError):
    """The pickle cannot be read, or is larger than any checkpoint's."""


class RefusedName(Exception):
    """The pickle asks for something that could be code; the message is its name."""


class Opaque(dict):
    """Stands for an object of a class that is not loaded: keeps what the file says about it, runs
    nothing.

    `name` is "module.Class", `args` what it would have been built from, `state` what would have
    been set on it, if anything.
    """

    def __init__(self, name: str, args: tuple = ()):
        super().__init__()
        self.name, self.args, self.state = name, args, None

    def __hash__(self):
        return id(self)

    def __eq__(self, other):
        return self is other

    def __repr__(self):
        return f"<{self.name}>"


@dataclass(frozen=True)
class Storage:
    """Where the numbers of tensors are."""

    record: str
    dtype: str


@dataclass(frozen=True)
class _Name:
    module: str
    name: str

    def __str__(self):
        return f"{self.module}.{self.name}"


_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_NOTHING = {"PROTO", "FRAME"}
_PLAIN = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES"),
    *("BINBYTES8", "BYTEARRAY8", "STRING", "BINSTRING", "SHORT_BINSTRING"),
}


class Unpickler:
    """Reads one pickle.

    `build(storage, offset, shape, strides)` makes a tensor; what it raises is passed on.
    """

    def __init__(self, data: bytes, build: Callable[[Storage, Any, Any, Any], Any]):
        if len(data) > MOST_BYTES:
            raise PickleFault(f"it has {len(data)} bytes, at most {MOST_BYTES} are read")
        self._data, self._build = data, build
        self._stack: list = []
        self._memo: dict[int, Any] = {}
        self._names: dict[tuple[str, str], _Name] = {}
        self._work = 0

    def read(self) -> Any:
        """The tree. PickleFault, RefusedName as they say."""
        for op, arg in self._opcodes():
            self._spend(1)
            if op == "STOP":
                return self._pop()
            self._step(op, arg)
        raise PickleFault("it does not end")

    def _opcodes(self) -> Iterator[tuple[str, Any]]:
        try:
            yield from ((op.name, arg) for op, arg, _ in pickletools.genops(self._data))
        except ValueError as e:
            raise PickleFault(f"{e}"[:200]) from e

    def _spend(self, work: int) -> None:
        self._work += work
        if self._work > MOST_WORK:
            raise PickleFault(f"it takes more than {MOST_WORK} steps to read")

    def _step(self, op: str, arg: Any) -> None:
        if op in _PLAIN:
            self._stack.append(_scalar(arg))
        elif op in _CONSTANTS:
            self._stack.append(_CONSTANTS[op])
        elif op in _ACTIONS:
            _ACTIONS[op](self, arg)
        elif op not in _NOTHING:
            raise PickleFault(f"it holds the opcode {op}, which no checkpoint needs")

    def _pop(self) -> Any:
        if not self._stack:
            raise PickleFault("it takes from an empty stack")
        value = self._stack.pop()
        if value is _MARK:
            raise PickleFault("it takes a mark for a value")
        return value

    def _drop(self) -> None:
        """The top, which may be a mark."""
        if not self._stack:
            raise PickleFault("it takes from an empty stack")
        self._stack.pop()

    def _top(self) -> Any:
        value = self._pop()
        self._stack.append(value)
        return value

    def _marked(self) -> list:
        """What was pushed since the last mark."""
        for at in range(len(self._stack) - 1, -1, -1):
            if self._stack[at] is _MARK:
                found = self._stack[at + 1 :]
                del self._stack[at:]
                return found
        raise PickleFault("it has no mark")

    # -- stack and memo ----------------------------------------------------------------------------

    def _put(self, index: int | None) -> None:
        self._memo[len(self._memo) if index is None else index] = self._top()

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise PickleFault(f"nothing was remembered as {index}")
        self._stack.append(self._memo[index])

    # -- containers --------------------------------------------------------------------------------

    def _tuple(self, size: int | None) -> None:
        if size is None:
            self._stack.append(tuple(self._marked()))
        else:
            self._stack.append(tuple([self._pop() for _ in range(size)][::-1]))

    def _append(self, items: list) -> None:
        to = self._top()
        if isinstance(to, list):
            to.extend(items)
        elif not isinstance(to, Opaque):  # that of a list's subclass is of no use
            raise PickleFault(f"it appends to a {type(to).__name__}")

    def _set(self, items: list) -> None:
        to = self._top()
        if not isinstance(to, dict) or len(items) % 2:
            raise PickleFault(f"it sets keys of a {type(to).__name__}")
        _fill(to, zip(items[::2], items[1::2], strict=True))

    def _pair(self, _) -> None:
        value = self._pop()
        self._set([self._pop(), value])

    def _dict(self, _) -> None:
        items = self._marked()
        self._stack.append({})
        self._set(items)

    # -- names and what they would make ------------------------------------------------------------

    def _name(self, module: Any, name: Any) -> _Name:
        if not isinstance(module, str) or not isinstance(name, str):
            raise PickleFault("it asks for a name that is no text")
        known = (module, name) in _KNOWN or (module, name) in _INERT_NAMES
        if not known and module.split(".")[0] not in _INERT_PACKAGES:
            raise RefusedName("".join(c if c.isprintable() else "?" for c in f"{module}.{name}"))
        return self._names.setdefault((module, name), _Name(module, name))

    def _global(self, pair: str) -> None:
        module, _, name = pair.partition(" ")
        self._stack.append(self._name(module, name))

    def _stack_global(self, _) -> None:
        name = self._pop()
        self._stack.append(self._name(self._pop(), name))

    def _inst(self, pair: str) -> None:
        module, _, name = pair.partition(" ")
        found = self._name(module, name)
        self._stack.append(self._made(found, tuple(self._marked())))

    def _obj(self, _) -> None:
        found, *args = self._marked() or [None]
        self._stack.append(self._made(found, tuple(args)))

    def _reduce(self, _) -> None:
        args = self._pop()
        self._stack.append(self._made(self._pop(), args))

    def _newobj_ex(self, _) -> None:
        self._pop()  # keyword arguments
        self._reduce(None)

    def _made(self, what: Any, args: Any) -> Any:
        if not isinstance(what, _Name) or not isinstance(args, tuple):
            raise PickleFault(f"it calls a {type(what).__name__}")
        name = (what.module, what.name)
        if name == ("torch._utils", "_rebuild_tensor_v2"):
            if len(args) < 4 or not isinstance(args[0], Storage):
                raise PickleFault("it has a tensor without storage")
            return self._build(*args[:4])
        if name == ("torch._utils", "_rebuild_parameter"):
            if not args:
                raise PickleFault("it has a parameter without tensor")
            return args[0]
        if name in _RECONSTRUCTORS:
            if not args or not isinstance(args[0], _Name):
                raise PickleFault("it rebuilds what is no class")
            return Opaque(str(args[0]))
        if name == ("torch", "Size"):
            return tuple(self._items(args))
        if what.module == "collections" and what.name in ("OrderedDict", "Counter"):
            given = self._items(args)
            pairs = given.items() if isinstance(given, dict) else given
            if not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in pairs):
                raise PickleFault(f"it makes a {what.name} of what are no pairs")
            return _fill({}, pairs)
        return Opaque(str(what), args)

    def _items(self, args: tuple) -> Any:
        """The container that is copied."""
        given = args[0] if args else ()
        if not isinstance(given, (list, tuple, dict)):
            raise PickleFault(f"it copies a {type(given).__name__}")
        self._spend(len(given))
        return given

    def _state(self, _) -> None:
        """Kept where it belongs to an inert object; an OrderedDict's own attributes are of no use.

        PickleFault for the rest: classes, functions, lists.
        """
        state, of = self._pop(), self._top()
        if isinstance(of, Opaque):
            of.state = state
        elif not isinstance(of, dict):
            raise PickleFault(f"it sets a state on a {type(of).__name__.strip('_').lower()}")

    def _persistent(self, _) -> None:
        """("storage", class, key, location, number of elements) → where the numbers are."""
        pid = self._pop()
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise PickleFault("it has an unknown kind of storage")
        kind, key = pid[1], pid[2]
        named = isinstance(kind, _Name) and kind.module == "torch" and kind.name in STORAGES
        if not named or not isinstance(key, str) or not key.isalnum() or len(key) > 20:
            raise PickleFault(f"it has a storage of unknown type ({kind if named else '?'})")
        self._stack.append(Storage(f"data/{key}", STORAGES[kind.name]))


_ACTIONS: dict[str, Callable[[Unpickler, Any], None]] = {
    "MARK": lambda u, _: u._stack.append(_MARK),
    "POP": lambda u, _: u._drop(),
    "POP_MARK": lambda u, _: u._marked() and None,
    "DUP": lambda u, _: u._stack.append(u._top()),
    **{op: Unpickler._put for op in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")},
    **{op: Unpickler._get for op in ("GET", "BINGET", "LONG_BINGET")},
    "EMPTY_LIST": lambda u, _: u._stack.append([]),
    "EMPTY_DICT": lambda u, _: u._stack.append({}),
    "EMPTY_SET": lambda u, _: u._stack.append([]),  # a list: nothing is hashed
    "LIST": lambda u, _: u._stack.append(u._marked()),
    "FROZENSET": lambda u, _: u._stack.append(u._marked()),
    "DICT": Unpickler._dict,
    "EMPTY_TUPLE": lambda u, _: u._tuple(0),
    "TUPLE1": lambda u, _: u._tuple(1),
    "TUPLE2": lambda u, _: u._tuple(2),
    "TUPLE3": lambda u, _: u._tuple(3),
    "TUPLE": lambda u, _: u._tuple(None),
    "APPEND": lambda u, _: u._append([u._pop()]),
    "APPENDS": lambda u, _: u._append(u._marked()),
    "ADDITEMS": lambda u, _: u._append(u._marked()),
    "SETITEM": Unpickler._pair,
    "SETITEMS": lambda u, _: u._set(u._marked()),
    "GLOBAL": Unpickler._global,
    "STACK_GLOBAL": Unpickler._stack_global,
    "INST": Unpickler._inst,
    "OBJ": Unpickler._obj,
    "REDUCE": Unpickler._reduce,
    "NEWOBJ": Unpickler._reduce,
    "NEWOBJ_EX": Unpickler._newobj_ex,
    "BUILD": Unpickler._state,
    "BINPERSID": Unpickler._persistent,
}


def _scalar(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise PickleFault(f"it holds an integer of {value.bit_length()} bits")
    return value


def _fill(to: dict, pairs: Any) -> dict:
    """Keys are texts and small numbers: hashing a container can take for ever, and numbers above 64
    bits can all have one hash.
    """
    for key, value in pairs:
        if not isinstance(key, (str, bytes, int, float, type(None))) or (
            isinstance(key, int) and key.bit_length() > 64
        ):
            raise PickleFault(f"it has a key that is a {type(key).__name__}")
        to[key] = value
    return to
