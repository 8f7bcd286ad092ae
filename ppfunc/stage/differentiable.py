"""A stage as a function of those leaves alone that are differentiated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from .abstract import Outline, call_named
from .contiguous import contiguous
from .errors import StageError
from .example import Example, Leaves, split_aux
from .program import Gradients
from .randomness import SettledDraws
from .signature import differentiable


class DifferentiableStage:
    """The stage as a function of its differentiable leaves alone; the others are set beforehand."""

    def __init__(self, fn: Callable[..., Any], example: Example, known: Outline, has_aux: bool, name: str) -> None:
        self.call, self.has_aux, self.name = example.caller(fn), has_aux, name
        self.param_at = [i for i, leaf in enumerate(example.params.leaves) if differentiable(leaf.dtype)]
        self.x_at = [i for i, leaf in enumerate(example.x.leaves) if leaf.grad]
        self.y_at = [i for i, leaf in enumerate(known.y.leaves) if leaf.grad]
        self.y, self.draws = known.y, known.draws

    def primals(self, params: Leaves, x: Leaves) -> tuple[Leaves, Leaves]:
        return tuple(params[i] for i in self.param_at), tuple(x[i] for i in self.x_at)

    def with_others(
        self, params: Leaves, x: Leaves, extras: Leaves
    ) -> Callable[[Leaves, Leaves], tuple[Leaves, Leaves]]:
        """A function ``(primal params, primal x) -> (y leaves with gradient, all outputs)``."""

        def run(primal_params: Leaves, primal_x: Leaves) -> tuple[Leaves, Leaves]:
            p, a = list(params), list(x)
            for i, value in zip(self.param_at, primal_params, strict=True):
                p[i] = value
            for i, value in zip(self.x_at, primal_x, strict=True):
                a[i] = value
            with SettledDraws() if self.draws else nullcontext():
                out = call_named(self.call, (tuple(p), tuple(a), extras), self.name)
            (y, y_def), (aux, _) = split_aux(out, self.has_aux, self.name)
            self.require_same(y, y_def)
            y = contiguous(y)
            return tuple(y[i] for i in self.y_at), y + contiguous(aux)

        return run

    def no_gradients(self, gy: Leaves, **_: Any) -> tuple[Gradients, Gradients]:
        """The backward of a stage through which no gradient flows."""
        return (None,) * len(self.param_at), (None,) * len(self.x_at)

    def require_same(self, y: Leaves, treedef: Any) -> None:
        """Raise unless ``y`` is what the example promised: neighbours were told so."""
        same = treedef == self.y.treedef and all(
            tuple(t.shape) == s.shape and t.dtype == s.dtype for t, s in zip(y, self.y.leaves, strict=True)
        )
        if not same:
            got = [f"{t.dtype}{list(t.shape)}" for t in y]
            reason = f"its output depends on values in structure or shape: got {got}, expected {self.y}"
            raise StageError(self.name, reason, "return the same shapes for every microbatch, by padding for instance")
