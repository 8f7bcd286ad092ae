"""The engine that differentiates at run time by ``torch.func.vjp``: any Python, at the price of its overhead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .abstract import Outline, outline as outline_of
from .contiguous import contiguous
from .differentiable import DifferentiableStage
from .dry_run import require_gradient
from .example import Example, Leaves
from .program import FlatProgram, Gradients, StageProgram, stage_program


def functional(
    fn: Callable[..., Any],
    example: tuple[Any, ...],
    *,
    has_aux: bool = False,
    name: str = "the stage",
    device: torch.device | str | None = None,
    outline: Outline | None = None,
) -> StageProgram:
    """An engine: ``torch.func.vjp`` at every forward.

    Control flow may depend on values, and the programs nest under ``vmap``, ``jvp`` and ``grad``.
    ``residuals`` is one opaque function, to be used once. The whole backward runs in
    ``backward_input``, which hands the gradients of the parameters over to ``backward_weight``.
    Where abstract evaluation needs values, the stage is run once on zeros to learn its outputs.

    Args, Returns: as :class:`~ppfunc.stage.program.Engine`; ``device`` as :meth:`Example.of`.

    Raises:
        StageError: the stage changes its arguments, or uses what ``torch.func`` cannot take.

    >>> program = functional(lambda w, x: (w * x).sin(), (torch.ones(2), torch.zeros(2)))
    >>> y, residuals = program.forward(torch.ones(2), torch.zeros(2))
    >>> gw, gx = program.backward(residuals, torch.ones(2))
    >>> gx
    tensor([1., 1.])
    """
    seen = Example.of(example, device)
    known = outline or outline_of(fn, example, has_aux=has_aux, name=name, device=device)
    flat = _flat(DifferentiableStage(fn, seen, known, has_aux, name))
    known = require_gradient(flat, known, seen, example, name=name, by="torch.func", instead="use the eager engine")
    return stage_program(flat, seen, known, has_aux=has_aux, residual_bytes=None)


def _flat(stage: DifferentiableStage) -> FlatProgram:
    def forward(params: Leaves, x: Leaves, extras: Leaves) -> tuple[Leaves, tuple[Any, ...]]:
        x, extras = contiguous(x), contiguous(extras)
        if not torch.is_grad_enabled():
            params, x, extras = _constant(params), _constant(x), _constant(extras)
        primals = stage.primals(params, x)
        run = stage.with_others(params, x, extras)
        with stage.unchanged(params, x, extras):
            if not (stage.y_at and any(primals)):
                return run(*primals)[1], (stage.no_gradients,)
            with torch.enable_grad():  # some operators keep what their backward needs only where it is on below the transform, too
                pulled: tuple[Any, ...] = torch.func.vjp(run, *primals, has_aux=True)
            _, pull, outputs = pulled
            return outputs, (pull,)

    def backward(residuals: tuple[Any, ...], gy: Leaves) -> tuple[Gradients, Gradients]:
        (pull,) = residuals
        again = torch.is_grad_enabled()
        gparams, gx = pull(contiguous(gy), retain_graph=again, create_graph=again)
        return gparams, contiguous(gx)

    def backward_input(residuals: tuple[Any, ...], gy: Leaves) -> tuple[Gradients, tuple[Any, ...]]:
        gparams, gx = backward(residuals, gy)
        return gx, gparams

    def backward_weight(rest: tuple[Any, ...]) -> Gradients:
        return rest

    return FlatProgram(forward, backward, backward_input, backward_weight)


def _constant(leaves: Leaves) -> Leaves:
    """Nothing is recorded of them outside of a transform."""
    return tuple(t.detach() if t.requires_grad else t for t in leaves)
