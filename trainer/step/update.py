"""The optimizer's update of the GPT as XLA programs, part by part of the trained tensors.

They depend on no shape of a batch: buckets share them. Like `trainer.step.programs`, they are
called from within a function that XLA does not compile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from common.xtts.operations import Operations, use
from trainer.step.optimizer import AdamW, packed_squares
from trainer.step.programs import Parts, Shared
from trainer.step.regions import Program


class UpdatePrograms:
    """The optimizer's update by parts: sums of squares; one decision from them; then each part's
    own update.

    Args:
        decide: (sum of squares, losses [3], enabled) → whether to update, the scalars of
            `AdamW.change` with the factor of clipping after them, and what is reported.
        clips: whether that factor may be other than 1.
        given: the variables in which gradients were added up, one per tensor of the optimizer, to
            be cleared; or the dtypes of the gradients that calls give, by part.
        more: signatures of what else `decide` takes.
    """

    def __init__(
        self,
        parts: Parts,
        optimizer: AdamW,
        chosen: Operations,
        decide: Callable,
        clips: bool,
        given: Sequence[tf.Variable] | Sequence[Sequence[tf.DType]],
        more: Sequence[tf.TensorSpec] = (),
    ):
        self._parts, self._optimizer, self._clips = parts, optimizer, clips
        self._sums, self._dtypes = (
            (given, None) if isinstance(given[0], tf.Variable) else (None, given)
        )
        made = Shared()
        self._squares, self._changes = [], []
        for i, part in enumerate(parts.all):
            dtypes = self._dtypes[i] if self._dtypes is not None else None
            key = (
                *(
                    (tuple(t.variable.shape), d)
                    for t, d in zip(part, self._decayed(i), strict=True)
                ),
                str(dtypes),
            )
            self._squares.append(
                made.get(("squares", key), lambda i=i: self._square_program(i, chosen))
            )
            self._changes.append(made.get(("change", key), lambda i=i: self._change_program(i)))
        scalar, flag = tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.bool)
        specs = [*[scalar] * len(parts.all), tf.TensorSpec([3], tf.float32), flag, *more]

        def decision(*args):
            squares, rest = args[: len(parts.all)], args[len(parts.all) : -1]
            return decide(tf.add_n(squares), *rest)

        self._decision = Program("decision", decision, specs, [optimizer.t])

    def __call__(
        self,
        gradients: list[list[tf.Tensor]],
        losses: tf.Tensor,
        enabled: tf.Tensor,
        more: Sequence[tf.Tensor] = (),
        squares: Sequence[tf.Tensor] | None = None,
    ) -> list[tf.Tensor]:
        """Update the weights; returns what `decide` reports. `squares`: what to take for this
        object's own `squares`.
        """
        squares = self.squares(gradients) if squares is None else squares
        given = (*squares, losses, enabled, *more)
        allowed, scalars, *report = self._decision(*given, self._optimizer.t)
        for i, program in enumerate(self._changes):
            given = self._given(i, gradients)
            tensors, own = (given, []) if self._sums is None else ([], given)
            program(*tensors, allowed, scalars, *self._variables(i), *own)
        return report

    def squares(self, gradients: list[list[tf.Tensor]]) -> list[tf.Tensor]:
        """The sum of squares of each part's gradients."""
        return [program(*self._given(i, gradients))[0] for i, program in enumerate(self._squares)]

    @property
    def programs(self) -> list[Program]:
        """Each once, the slowest to compile first."""
        return list(dict.fromkeys([*self._changes, *self._squares, self._decision]))

    def _given(self, i: int, gradients: list[list[tf.Tensor]]) -> list:
        return (
            gradients[i] if self._sums is None else [self._sums[k] for k in self._parts.places[i]]
        )

    def _decayed(self, i: int) -> list[bool]:
        return [self._optimizer.decayed[k] for k in self._parts.places[i]]

    def _variables(self, i: int) -> list[tf.Variable]:
        places, o = self._parts.places[i], self._optimizer
        return [v[k] for v in (o.parameters, o.exp_avg, o.exp_avg_sq) for k in places]

    def _square_program(self, i: int, chosen: Operations) -> Program:
        def run(*gradients):
            with use(chosen):
                return [
                    packed_squares(
                        [g if isinstance(g, tf.Tensor) else g.read_value() for g in gradients]
                    )
                ]

        return self._program("squares", run, i, [], [])

    def _change_program(self, i: int) -> Program:
        n, decayed, cleared = len(self._parts.all[i]), self._decayed(i), self._sums is not None

        def run(*args):
            gradients, args = ([], args) if cleared else (args[:n], args[n:])
            allowed, scalars, *variables = args
            p, m, v, sums = (variables[k * n : (k + 1) * n] for k in range(4))
            gradients = (
                [tf.cast(g, x.dtype) for g, x in zip(gradients, p, strict=True)]
                if gradients
                else [s.read_value() for s in sums]
            )
            if self._clips:
                gradients = [g * scalars[-1] for g in gradients]
            self._optimizer.change(p, m, v, gradients, decayed, scalars[:-1], allowed)
            for s in sums:
                s.assign(tf.zeros_like(s))
            return [tf.zeros([])]

        flags = [
            tf.TensorSpec([], tf.bool),
            tf.TensorSpec([self._optimizer.num_scalars + 1], tf.float32),
        ]
        return self._program("update", run, i, flags, self._variables(i))

    def _program(self, name: str, run: Callable, i: int, specs: list, variables: list) -> Program:
        part = self._parts.all[i]
        if self._sums is None:
            specs = [
                *(
                    tf.TensorSpec(t.variable.shape, d)
                    for t, d in zip(part, self._dtypes[i], strict=True)
                ),
                *specs,
            ]
            return Program(f"{name} of {len(part)} tensors", run, specs, variables)
        return Program(
            f"{name} of {len(part)} tensors", run, specs, [*variables, *self._given(i, [])]
        )
