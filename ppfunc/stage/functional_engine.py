"""The engine that differentiates at run time by ``torch.func.vjp``: any Python, at the price of its overhead."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .abstract import DATA_DEPENDENT, Outline, outline, outline_by_running
from .boundary import settled
from .errors import StageError
from .example import Example, Leaves, stand_ins
from .primals import Primals
from .program import FlatProgram, Gradients, StageProgram, stage_program


def functional(
    fn: Callable[..., Any],
    example: tuple[Any, ...],
    *,
    has_aux: bool = False,
    name: str = "the stage",
    device: torch.device | str | None = None,
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
    known, abstract = _outline(fn, seen, example, has_aux, name)
    flat = _flat(Primals(fn, seen, known, has_aux, name))
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) if abstract else nullcontext():
        _try(flat, known, seen.make if abstract else lambda: stand_ins(example, seen.device), name)
    return stage_program(flat, seen, known, has_aux=has_aux, residual_bytes=None)


def _outline(
    fn: Callable[..., Any], seen: Example, example: tuple[Any, ...], has_aux: bool, name: str
) -> tuple[Outline, bool]:
    """What the stage returns, and whether that could be learned without values."""
    try:
        return outline(fn, seen, has_aux=has_aux, name=name), True
    except StageError as error:
        if not isinstance(error.__cause__, DATA_DEPENDENT):
            raise
    return outline_by_running(fn, seen, example, has_aux=has_aux, name=name), False


def _try(flat: FlatProgram, known: Outline, make: Callable[[], tuple[Leaves, Leaves, Leaves]], name: str) -> None:
    """Raise if ``torch.func`` refuses a stage that runs without it."""
    try:
        outputs, residuals = flat.forward(*make())
        gy = tuple(torch.ones_like(t) for t, leaf in zip(outputs, known.y.leaves, strict=False) if leaf.grad)
        flat.backward(residuals, gy)
    except StageError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        reason = f"it runs, but torch.func cannot differentiate it ({type(error).__name__}: {first})"
        raise StageError(name, reason, "use the eager engine, which uses torch.autograd.grad") from error


def _flat(stage: Primals) -> FlatProgram:
    def forward(params: Leaves, x: Leaves, consts: Leaves) -> tuple[Leaves, tuple[Any, ...]]:
        x, consts = settled(x), settled(consts)
        primals = stage.primals(params, x)
        run = stage.with_others(params, x, consts)
        if not (stage.y_at and any(primals)):
            return run(*primals)[1], (stage.no_gradients,)
        _, pull, outputs = torch.func.vjp(run, *primals, has_aux=True)
        return outputs, (pull,)

    def backward(residuals: tuple[Any, ...], gy: Leaves) -> tuple[Gradients, Gradients]:
        (pull,) = residuals
        again = torch.is_grad_enabled()
        gparams, gx = pull(settled(gy), retain_graph=again, create_graph=again)
        return gparams, settled(gx)

    def backward_input(residuals: tuple[Any, ...], gy: Leaves) -> tuple[Gradients, tuple[Any, ...]]:
        gparams, gx = backward(residuals, gy)
        return gx, gparams

    def backward_weight(rest: tuple[Any, ...]) -> Gradients:
        return rest

    return FlatProgram(forward, backward, backward_input, backward_weight)
