"""Differentiate a stage at run time: by ``torch.func.vjp``, or by the tape of autograd."""

from collections.abc import Callable
from typing import Any

import torch

from .._torch import without_autocast
from ..abstract.differentiable import DifferentiableStage, contiguous, engine
from ..abstract.evaluation import (
    DATA_DEPENDENT,
    stand_ins,
    without_values,
)
from ..errors import StageError, by_dtensor, first_line, line_of, other_engine, refuse_own
from ..program import FlatProgram, Gradients, Leaves

Forward = Callable[[Leaves, Leaves, Leaves], tuple[Leaves, tuple[Any, ...]]]
Backward = Callable[[tuple[Any, ...], Leaves], tuple[Gradients, Gradients]]


@engine
def functional(stage: DifferentiableStage, example: tuple[Any, ...]) -> tuple[FlatProgram, None]:
    """Differentiate a stage by ``torch.func.vjp`` at every forward.

    Control flow may depend on values, and the programs nest under ``vmap``, ``jvp`` and ``grad``.
    ``residuals`` is one opaque function, to be used once. The whole backward runs in ``backward_input``,
    which hands the gradients of the parameters over to ``backward_weight``. A stage whose abstract evaluation
    needs values is run once on zeros, to learn its outputs.

    Not detected: writes into an argument through ``.data``, ``numpy()`` or a pointer after the evaluation.
    They do not count as writes.

    Args, Returns: as :class:`~ppfunc.stage.program.Engine`; ``device`` as :meth:`Example.of`.

    Raises:
        StageError: the stage changes its arguments, or has operators that ``torch.func`` cannot transform.

    >>> program = functional(lambda w, x: (w * x).sin(), (torch.ones(2), torch.zeros(2)))
    >>> y, residuals = program.forward(torch.ones(2), torch.zeros(2))
    >>> gw, gx = program.backward(residuals, torch.ones(2))
    >>> gx
    tensor([1., 1.])
    """
    return _checked_program(_by_vjp, "torch.func", other_engine("eager"), stage, example)


@engine
def eager(stage: DifferentiableStage, example: tuple[Any, ...]) -> tuple[FlatProgram, None]:
    """Differentiate a stage by the tape of autograd, one per forward.

    For ``torch.utils.checkpoint`` (``use_reentrant=False``), modules under ``torch.compile``,
    ``autograd.Function`` of the old style, and DTensor. ``residuals`` holds the tape: it can be used once.
    Otherwise as :func:`functional`, also in what is not detected. It does not nest under transforms.

    Args, Returns: as :class:`~ppfunc.stage.program.Engine`; ``device`` as :meth:`Example.of`.

    Raises:
        StageError: the stage changes its arguments, or autograd refuses it.

    >>> program = eager(lambda w, x: (w * x).sin(), (torch.ones(2), torch.zeros(2)))
    >>> y, residuals = program.forward(torch.ones(2), torch.zeros(2))
    >>> program.backward(residuals, torch.ones(2))
    (tensor([0., 0.]), tensor([1., 1.]))
    """
    instead = "rewrite what it refuses; a checkpoint, for instance, needs use_reentrant=False"
    return _checked_program(_by_tape, "torch.autograd.grad", instead, stage, example)


def _checked_program(
    differentiate: Callable[[DifferentiableStage], tuple[Forward, Backward]],
    by: str,
    instead: str,
    stage: DifferentiableStage,
    example: tuple[Any, ...],
) -> tuple[FlatProgram, None]:
    """Make the program of a stage, and run it once, to find out whether the stage can be differentiated.

    ``by`` names the way, and ``instead`` is the advice if it refuses.
    """
    forward, backward = differentiate(stage)

    def backward_input(residuals: tuple[Any, ...], gy: Leaves) -> tuple[Gradients, tuple[Any, ...]]:
        gparams, gx = backward(residuals, gy)
        return gx, gparams

    @torch.no_grad()
    def run(arguments: tuple[Leaves, Leaves, Leaves]) -> None:
        outputs, residuals = forward(*arguments)
        backward(residuals, tuple(torch.ones_like(outputs[i]) for i in stage.y_at))

    try:
        if stage.outline.known:
            try:
                with without_values():
                    run(stage.example.make())
            except DATA_DEPENDENT:
                # Libraries that look for fake tensors, to ask them for no values, do not see them within a
                # transform. They may take another path than the one seen.
                stage.outline = stage.outline._replace(known=False)
        if not stage.outline.known:
            run(stand_ins(example, stage.example.device))
    except StageError:
        raise
    except Exception as error:
        refuse_own(error, stage.name)
        reason = f"it runs, but {by} cannot differentiate it ({first_line(error)})"
        if by_dtensor(error):
            reason = f"it uses DTensors, whose own functions {by} cannot differentiate"
            instead = "use the graph engine"
        elif "setup_context" in reason:
            reason = (
                f"it calls an autograd.Function without setup_context, or an operator with register_autograd"
                f"{line_of(error)}, which {by} does not take"
            )
            instead = f"{other_engine('eager')}, or graph"
        raise StageError(stage.name, reason, instead) from error
    return FlatProgram(forward, backward, backward_input, lambda gparams: gparams), None


def _by_vjp(stage: DifferentiableStage) -> tuple[Forward, Backward]:
    def forward(params: Leaves, x: Leaves, extras: Leaves) -> tuple[Leaves, tuple[Any, ...]]:
        x, extras = contiguous(x), contiguous(extras)
        if not torch.is_grad_enabled():  # nothing is recorded of them outside of a transform
            params, x, extras = (
                tuple(t.detach() if t.requires_grad else t for t in leaves) for leaves in (params, x, extras)
            )
        primals = stage.primals(params, x)
        run = stage.with_others(params, x, extras)
        with stage.unchanged(params, x, extras):
            if not (stage.y_at and any(primals)):
                return run(*primals)[1], (stage.no_gradients,)
            # Some operators keep what their backward needs only where it is on below the transform, too.
            with torch.enable_grad():
                pulled: tuple[Any, ...] = torch.func.vjp(run, *primals, has_aux=True)
            return pulled[2], (pulled[1],)

    def backward(residuals: tuple[Any, ...], gy: Leaves) -> tuple[Gradients, Gradients]:
        again = torch.is_grad_enabled()
        gparams, gx = residuals[0](contiguous(gy), retain_graph=again, create_graph=again)
        return stage.dense(gparams), contiguous(gx)

    return forward, backward


def _by_tape(stage: DifferentiableStage) -> tuple[Forward, Backward]:
    def forward(params: Leaves, x: Leaves, extras: Leaves) -> tuple[Leaves, tuple[Any, ...]]:
        # Autograd saves no inference tensors: copies take their place.
        groups = (params, contiguous(x), contiguous(extras))
        params, x, extras = (tuple(t.clone() if t.is_inference() else t for t in leaves) for leaves in groups)
        with stage.unchanged(params, x, extras), torch.enable_grad():
            primals = tuple(
                tuple(t.detach().requires_grad_() for t in group) for group in stage.primals(params, x)
            )
            y, outputs = stage.with_others(params, x, extras)(*primals)
        return tuple(t.detach() for t in outputs), (y, *primals)

    def backward(residuals: tuple[Any, ...], gy: Leaves) -> tuple[Gradients, Gradients]:
        y, params, x = residuals
        del residuals
        reached = [(t, g) for t, g in zip(y, contiguous(gy), strict=True) if t.requires_grad]
        if not (reached and (params or x)):
            return stage.no_gradients(gy)
        outputs, cotangents = zip(*reached, strict=True)
        with without_autocast():
            gradients = torch.autograd.grad(outputs, params + x, cotangents, allow_unused=True)
        return stage.dense(gradients[: len(params)]), contiguous(gradients[len(params) :])

    return forward, backward
