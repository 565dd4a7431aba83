"""Regions: parts of a step that XLA compiles separately, each once for all the places it is used
in.

A step of 30 equal blocks as one XLA program takes over a minute to trace and compile, for each
bucket anew. As regions it is a few small programs: a block's forward and backward pass are compiled
once and called for every block, with its own weights.

A `Region` is traced once, gradients included, and cut in two. The forward program returns, beside
its outputs, what the backward program cannot get more cheaply itself. It hands over nothing that is
an argument, or a view, constant or unpacked part of one: an XLA program copies whatever it returns.

Variables are arguments: XLA reads and writes them in place. Integers travel as the bits of float32
("words"): between programs, TensorFlow keeps int32 tensors in host memory, and fetching one waits
for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

_ALIASES = frozenset(("Identity", "IdentityN"))
_VIEWS = frozenset(("Reshape", "ExpandDims", "Squeeze"))
_CHEAP = _VIEWS | {"Const", "Bitcast", "Shape", "Unpack"}

Function = Callable[..., Sequence[tf.Tensor]]


def as_words(x: tf.Tensor) -> tf.Tensor:
    """int32 → the float32 of the same bits; anything else as it is."""
    return tf.bitcast(x, tf.float32) if x.dtype == tf.int32 else x


def as_ints(x: tf.Tensor) -> tf.Tensor:
    """Inverse of `as_words`."""
    return tf.bitcast(x, tf.int32)


def word_spec(spec: tf.TensorSpec) -> tf.TensorSpec:
    """The signature of what `as_words` makes of it."""
    return tf.TensorSpec(spec.shape, tf.float32) if spec.dtype == tf.int32 else spec


def as_computed(gradient: tf.Tensor) -> tf.Tensor:
    """A weight's gradient before it was widened to the weight's dtype, which adds nothing to it: a
    program that returns it would write and others read twice the bytes.
    """
    op = gradient.op
    widened = op.type == "Cast" and op.inputs[0].dtype.is_floating
    return op.inputs[0] if widened and op.inputs[0].dtype.size < gradient.dtype.size else gradient


_told: ContextVar[Callable[[Program], object] | None] = ContextVar("told", default=None)


@contextmanager
def each_program(told: Callable[[Program], object]) -> Iterator[None]:
    """Inside, `told` gets each program that this thread traces as soon as it can be compiled: that
    need not wait until all of a function's programs are traced.
    """
    token = _told.set(told)
    try:
        yield
    finally:
        _told.reset(token)


class Program:
    """`function(*tensors, *variables)` as one XLA program, called from within a function that XLA
    does not compile.

    Args:
        name: what it is, for messages.
        specs: signatures of the tensors; none is int32.
        variables: those to trace with; calls may pass others of the same shapes.
    """

    def __init__(
        self,
        name: str,
        function: Function,
        specs: Sequence[tf.TensorSpec],
        variables: Sequence[tf.Variable] = (),
    ):
        self.name, self._specs, self._variables = name, list(specs), list(variables)
        compiled = tf.function(function, jit_compile=True, autograph=False)
        self._call = compiled.get_concrete_function(*self._specs, *self._variables)
        if (told := _told.get()) is not None:
            told(self)

    def __call__(self, *args) -> list[tf.Tensor]:
        """Its results, flat."""
        return tf.nest.flatten(self._call(*args))

    def compile(self) -> None:
        """Run it on zeros and wait; programs that write variables must not change them where all
        tensors are 0 (see `Region`).

        TensorFlow keeps compiled programs by name and shapes for the whole process, so several may
        be compiled side by side, each in its own thread.
        """

        def alone():
            # Zeros of the graph: made one by one by several threads, TensorFlow 2.21 confuses their
            # shapes (seen on a GPU).
            zeros = [_zeros(s) for s in self._specs]
            return [x for x in self(*zeros, *self._variables) if x.dtype.is_floating][:1]

        for result in tf.function(alone, autograph=False)():
            result.numpy()

    @property
    def dtypes(self) -> list[tf.DType]:
        """The dtypes of its results."""
        return [x.dtype for x in tf.nest.flatten(self._call.structured_outputs)]


@dataclass(frozen=True)
class Chain:
    """A function that calls programs, one after the other."""

    name: str
    function: Any

    def compile(self) -> None:
        """Trace it; XLA compiles nothing of it."""
        self.function.get_concrete_function()


class Region:
    """`function(*inputs, *weights) -> outputs` as a forward and a backward program.

    Its gradients are taken with the operations in force where it is made.

    Args:
        function: traceable; a sequence of tensors, of which the first `num_differentiable` have
            gradients.
        inputs: signatures of its inputs.
        variables: the weights of one of its places.
        wrt: indices of the inputs whose gradients are wanted.
        sums: the backward program adds the weights' gradients to variables that it is given,
            instead of returning them.
        recompute: hand nothing over: the backward program runs the forward pass again.
    """

    def __init__(
        self,
        name: str,
        function: Function,
        inputs: Sequence[tf.TensorSpec],
        variables: Sequence[tf.Variable],
        *,
        wrt: Sequence[int] = (),
        num_differentiable: int = 1,
        sums: Sequence[tf.Variable] | None = None,
        recompute: bool = False,
    ):
        self._num_inputs, self._num_wrt, self._adds = len(inputs), len(wrt), sums is not None
        cut = _Cut(_traced(function, inputs, variables, wrt, num_differentiable), recompute)
        self._num_outputs, self._used = len(cut.traced.outputs), cut.used
        self.forward = cut.forward(f"{name}, forward", variables)
        self.backward = cut.backward(f"{name}, backward", variables, len(wrt), sums)

    def __call__(
        self, *inputs: tf.Tensor, variables: Sequence[tf.Variable]
    ) -> tuple[list[tf.Tensor], Callable]:
        """(outputs, back); `back(*d_outputs, sums=…)` returns the gradients of the `wrt` inputs,
        then those of the weights, unless it adds these to `sums`.
        """
        args = [*inputs, *variables]
        results = self.forward(*args)
        outputs, residuals = results[: self._num_outputs], results[self._num_outputs :]

        def back(*d_outputs: tf.Tensor, sums: Sequence[tf.Variable] = ()) -> list[tf.Tensor]:
            used = [args[i] for i in self._used]
            tensors, weights = used[: self._num_used_inputs()], used[self._num_used_inputs() :]
            return self.backward(*d_outputs, *tensors, *residuals, *weights, *sums)

        return outputs, back

    def _num_used_inputs(self) -> int:
        return sum(i < self._num_inputs for i in self._used)

    @property
    def gradient_dtypes(self) -> list[tf.DType]:
        """The dtypes of the weights' gradients as the backward program returns them: as computed,
        not those of the weights.
        """
        return self.backward.dtypes[self._num_wrt :]

    @property
    def programs(self) -> list[Program]:
        """Both, the larger one first."""
        return [self.backward, self.forward]


@dataclass
class _Traced:
    """One graph with both passes: the operations before `boundary` are the forward pass's.

    Weights follow the inputs in `args`.
    """

    graph: tf.Graph
    args: list[tf.Tensor]
    num_inputs: int
    outputs: list[tf.Tensor]
    d_outputs: list[tf.Tensor]
    gradients: list[tf.Tensor]
    boundary: int


def _traced(
    function: Function,
    inputs: Sequence[tf.TensorSpec],
    variables: Sequence,
    wrt: Sequence[int],
    num_differentiable: int,
) -> _Traced:
    specs = [*inputs, *(tf.TensorSpec(v.shape, v.dtype) for v in variables)]
    graph = tf.Graph()
    with graph.as_default():
        args = [tf.compat.v1.placeholder(s.dtype, s.shape) for s in specs]
        watched = [args[i] for i in (*wrt, *range(len(inputs), len(specs)))]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(watched)
            outputs = list(function(*args))
        boundary = len(graph.get_operations())
        differentiable = outputs[:num_differentiable]
        d_outputs = [tf.compat.v1.placeholder(y.dtype, y.shape) for y in differentiable]
        gradients = tape.gradient(differentiable, watched, d_outputs)
        without = [x.shape for x, g in zip(watched, gradients, strict=True) if g is None]
        if without:
            raise ValueError(f"arguments of shape {without} have no part in the outputs")
    gradients[len(wrt) :] = [as_computed(g) for g in gradients[len(wrt) :]]
    return _Traced(graph, args, len(inputs), outputs, d_outputs, gradients, boundary)


class _Cut:
    """The cut through the graph of both passes: the backward program takes the `used` arguments and
    the `residuals`.
    """

    def __init__(self, traced: _Traced, recompute: bool):
        self.traced, self._recompute = traced, recompute
        self._forward = {op.name for op in traced.graph.get_operations()[: traced.boundary]}
        self._args = {x.name: i for i, x in enumerate(traced.args)}
        self._ends = {d.op.name for d in traced.d_outputs}
        # What an operation of the backward program reads → the tensor that is handed over for it.
        self._fed = self._walk()
        given = {x.name: x for x in self._fed.values()}
        self.used = sorted(self._args[name] for name in given if name in self._args)
        self.residuals = [x for name, x in given.items() if name not in self._args]

    def _walk(self) -> dict[str, tf.Tensor]:
        """Walk from the gradients back to what is given or handed over."""
        fed, seen, stack = {}, set(), [g.op for g in self.traced.gradients]
        while stack:
            op = stack.pop()
            if op.name in seen or op.name in self._ends:
                continue
            seen.add(op.name)
            for x in op.inputs:
                source = self._source(x)
                if source.name in self._args:
                    fed[x.name] = source
                elif x.op.name not in self._forward or self._again(source):
                    stack.append(x.op)
                else:
                    fed[x.name] = source
        return fed

    def _source(self, x: tf.Tensor) -> tf.Tensor:
        while x.op.name in self._forward and x.op.type in _ALIASES:
            x = x.op.inputs[x.value_index]
        return x

    def _again(self, x: tf.Tensor) -> bool:
        """Whether the backward program computes `x` itself.

        Integers always: they would travel through the host.
        """
        return self._recompute or x.dtype.is_integer or x.op.type in _VIEWS or self._is_cheap(x)

    def _is_cheap(self, x: tf.Tensor) -> bool:
        sources = [self._source(y) for y in x.op.inputs]
        return x.op.type in _CHEAP and all(
            y.name in self._args or self._is_cheap(y) for y in sources
        )

    def forward(self, name: str, variables: Sequence[tf.Variable]) -> Program:
        """inputs, weights → outputs, residuals."""
        traced = self.traced

        def run(*given):
            fed = {x.name: _value(y) for x, y in zip(traced.args, given, strict=True)}
            return _copied(traced.graph, [*traced.outputs, *self.residuals], fed)

        return Program(name, run, _specs(traced.args[: traced.num_inputs]), variables)

    def backward(
        self,
        name: str,
        variables: Sequence[tf.Variable],
        num_wrt: int,
        sums: Sequence[tf.Variable] | None,
    ) -> Program:
        """Gradients of the outputs, used inputs, residuals, used weights, sums → gradients."""
        traced = self.traced
        inputs = [i for i in self.used if i < traced.num_inputs]
        weights = [i for i in self.used if i >= traced.num_inputs]
        tensors = [*traced.d_outputs, *(traced.args[i] for i in inputs), *self.residuals]
        feeds = [*tensors, *(traced.args[i] for i in weights)]

        def run(*given):
            fed = {x.name: _value(y) for x, y in zip(feeds, given[: len(feeds)], strict=True)}
            fed |= {name: fed[source.name] for name, source in self._fed.items()}
            gradients = _copied(traced.graph, traced.gradients, fed)
            if sums is None:
                return gradients
            for total, gradient in zip(given[len(feeds) :], gradients[num_wrt:], strict=True):
                total.assign_add(tf.cast(gradient, total.dtype))
            return gradients[:num_wrt] or [tf.zeros([])]

        own = [variables[i - traced.num_inputs] for i in weights]
        return Program(name, run, _specs(tensors), [*own, *(sums or ())])


def _zeros(spec: tf.TensorSpec) -> tf.Tensor:
    if spec.dtype.size > 1 or not spec.dtype.is_floating:
        return tf.zeros(spec.shape, spec.dtype)
    # TensorFlow has no operation of its own that fills a tensor of FP8.
    made = tf.function(lambda: tf.cast(tf.zeros(spec.shape), spec.dtype), jit_compile=True)
    return made()


def _value(x) -> tf.Tensor:
    return x if isinstance(x, tf.Tensor) else x.read_value()


def _specs(tensors: Sequence[tf.Tensor]) -> list[tf.TensorSpec]:
    return [tf.TensorSpec(x.shape, x.dtype) for x in tensors]


def _copied(
    graph: tf.Graph, fetched: Sequence[tf.Tensor], fed: dict[str, tf.Tensor]
) -> list[tf.Tensor]:
    """`fetched`, computed anew in the default graph from `fed` (a tensor's name in `graph` →
    tensor).
    """
    needed, read, stack = set(), set(), list(fetched)
    while stack:
        x = stack.pop()
        if x.name not in fed and x.op.name not in needed:
            needed.add(x.op.name)
            read |= {y.name for y in x.op.inputs if y.name in fed}
            stack += x.op.inputs
    whole, part = graph.as_graph_def(), tf.compat.v1.GraphDef()
    part.versions.CopyFrom(whole.versions)
    part.library.CopyFrom(whole.library)
    part.node.extend(node for node in whole.node if node.name in needed)
    computed = [x.name for x in fetched if x.name not in fed]
    results = tf.graph_util.import_graph_def(
        part, {x: fed[x] for x in read}, computed, name="region"
    )
    values = dict(zip(computed, results, strict=True))
    return [tf.identity(fed[x.name]) if x.name in fed else values[x.name] for x in fetched]
