"""The engine that differentiates by ``torch.autograd.grad``: for stages that ``torch.func`` and tracing cannot take."""

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


def eager(
    fn: Callable[..., Any],
    example: tuple[Any, ...],
    *,
    has_aux: bool = False,
    name: str = "the stage",
    device: torch.device | str | None = None,
    outline: Outline | None = None,
) -> StageProgram:
    """An engine: the tape of autograd, one per forward.

    For ``torch.utils.checkpoint`` (``use_reentrant=False``), modules under ``torch.compile``,
    ``autograd.Function`` of the old style, and DTensor. ``residuals`` holds the tape: it can be
    used once. The whole backward runs in ``backward_input``, which hands the gradients of the
    parameters over to ``backward_weight``. Where abstract evaluation fails, the stage is run once,
    on zeros of the example's shapes, to learn its outputs.

    Args, Returns: as :class:`~ppfunc.stage.program.Engine`; ``device`` as :meth:`Example.of`.

    Raises:
        StageError: the stage changes its arguments, or autograd refuses it.

    >>> program = eager(lambda w, x: (w * x).sin(), (torch.ones(2), torch.zeros(2)))
    >>> y, residuals = program.forward(torch.ones(2), torch.zeros(2))
    >>> gw, gx = program.backward(residuals, torch.ones(2))
    >>> gx
    tensor([1., 1.])
    """
    seen = Example.of(example, device)
    known = outline or outline_of(fn, example, has_aux=has_aux, name=name, device=device)
    flat = _flat(DifferentiableStage(fn, seen, known, has_aux, name))
    instead = "rewrite what it refuses; a checkpoint, for instance, needs use_reentrant=False"
    known = require_gradient(flat, known, seen, example, name=name, by="torch.autograd.grad", instead=instead)
    return stage_program(flat, seen, known, has_aux=has_aux, residual_bytes=None)


def _flat(stage: DifferentiableStage) -> FlatProgram:
    def forward(params: Leaves, x: Leaves, extras: Leaves) -> tuple[Leaves, tuple[Any, ...]]:
        x, extras = contiguous(x), contiguous(extras)
        with stage.unchanged(params, x, extras), torch.enable_grad():
            primals = tuple(tuple(t.detach().requires_grad_() for t in group) for group in stage.primals(params, x))
            y, outputs = stage.with_others(params, x, extras)(*primals)
        return tuple(t.detach() for t in outputs), (y, *primals)

    def backward(residuals: tuple[Any, ...], gy: Leaves) -> tuple[Gradients, Gradients]:
        y, params, x = residuals
        del residuals
        if not (y and (params or x)):
            return (None,) * len(params), (None,) * len(x)
        gradients = torch.autograd.grad(y, params + x, contiguous(gy), allow_unused=True)
        return gradients[: len(params)], contiguous(gradients[len(params) :])

    def backward_input(residuals: tuple[Any, ...], gy: Leaves) -> tuple[Gradients, tuple[Any, ...]]:
        gparams, gx = backward(residuals, gy)
        return gx, gparams

    def backward_weight(rest: tuple[Any, ...]) -> Gradients:
        return rest

    return FlatProgram(forward, backward, backward_input, backward_weight)
