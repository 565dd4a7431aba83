"""Networks to and from Coqui's state dicts: its key names, torch's axis order, NumPy arrays.

Works for every `layers.Module`: the layers themselves declare keys and permutations. Keys carry no
prefix of the checkpoint file (`gpt.`, `hifigan_decoder.`): the caller adds or strips it with
`with_prefix` / `without_prefix`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np

from common.xtts.layers import Module, Tensor

_MOST_NAMED = 20


class WeightsError(ValueError):
    """A state dict that does not fit the model; names at most 20 of the tensors at fault."""


def tensors(model: Module) -> dict[str, Tensor]:
    """All tensors of `model` by key.

    WeightsError where a variable has no key, or two have the same: a mistake in the model's source.
    """
    found = list(model.tensors())
    by_key = {t.key: t for t in found}
    if len(by_key) != len(found):
        raise WeightsError(
            f"{model.name}: {len(found) - len(by_key)} tensors share a key with another; name"
            " sibling modules apart"
        )
    undeclared = {id(v) for v in model.variables} - {id(t.variable) for t in found}
    if undeclared:
        names = [v.path for v in model.variables if id(v) in undeclared]
        raise WeightsError(
            f"{model.name}: variables without a checkpoint key: {_few(names)}; create them with"
            " Module.tensor"
        )
    return by_key


def num_parameters(model: Module, trainable_only: bool = False) -> int:
    """Numbers held by the model's tensors, without reading them: the variables may be unallocated
    (`keras.StatelessScope`).
    """
    return sum(
        math.prod(t.torch_shape) for t in model.tensors() if t.trainable or not trainable_only
    )


def to_torch(t: Tensor, array: np.ndarray) -> np.ndarray:
    """`array`, laid out like the variable (weight or moment), in torch's layout, contiguous."""
    return np.ascontiguousarray(np.transpose(array, t.to_torch))


def from_torch(t: Tensor, array: np.ndarray) -> np.ndarray:
    """`array` in torch's layout, in the variable's."""
    return np.transpose(array, t.from_torch)


def state_dict(model: Module) -> dict[str, np.ndarray]:
    """Copies of all tensors by Coqui's key, in torch's layout and in the variables' dtypes."""
    return {key: to_torch(t, t.variable.numpy()) for key, t in tensors(model).items()}


def load_state_dict(model: Module, state: Mapping[str, np.ndarray]) -> None:
    """Set every tensor of `model` from `state`, strictly: nothing is assigned unless all names and
    shapes fit.

    Keys that match one of the model's `ignored_keys` are skipped. WeightsError names what is
    missing, extra or misshapen.
    """
    own = tensors(model)
    check(model.name, {key: t.torch_shape for key, t in own.items()}, state, model.ignored_keys)
    for key, t in own.items():
        t.variable.assign(from_torch(t, np.asarray(state[key])))


def check(
    what: str,
    shapes: Mapping[str, tuple[int, ...]],
    state: Mapping[str, np.ndarray],
    ignored: tuple[str, ...] = (),
) -> None:
    """WeightsError unless `state` has exactly the keys and shapes of `shapes`, besides keys that
    fully match a regex of `ignored`.
    """
    both = [key for key in shapes if key in state]
    faults = {
        "missing": [key for key in shapes if key not in state],
        "extra": [
            key
            for key in state
            if key not in shapes and not any(re.fullmatch(pattern, key) for pattern in ignored)
        ],
        "misshapen": [
            f"{key} is {tuple(state[key].shape)}, needs {shapes[key]}"
            for key in both
            if tuple(state[key].shape) != shapes[key]
        ],
    }
    if any(faults.values()):
        listed = "; ".join(
            f"{len(names)} {fault}: {_few(names)}" for fault, names in faults.items() if names
        )
        raise WeightsError(f"{what}: the weights do not fit the model's dims: {listed}")


def with_prefix(prefix: str, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same arrays under `prefix` + key."""
    return {prefix + key: array for key, array in state.items()}


def without_prefix(prefix: str, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays whose key starts with `prefix`, without it; the others are left out."""
    return {key[len(prefix) :]: array for key, array in state.items() if key.startswith(prefix)}


def _few(names: list[str]) -> str:
    rest = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
