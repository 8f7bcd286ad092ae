"""Differentiate the loss by another engine than the last stage: two programs that run as one.

Equivalent to, for ``stage`` and ``loss`` as the two engines differentiate them::

    y = stage(params, x)
    return loss(y, target)
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .._torch import is_dtensor
from ..errors import StageError
from ..output import Output, StageFunction, children
from ..program import (
    Engine,
    Example,
    FlatProgram,
    Leaves,
    LossResiduals,
    Outline,
    Stage,
    StageProgram,
    stage_program,
)
from ..signature import Signature
from ..tree import tree_leaves


def with_loss_apart(
    engine: Engine,
    loss_engine: Engine,
    function: StageFunction,
    example: tuple[Any, ...],
    name: str,
    device: torch.device,
    known: Outline,
) -> StageProgram:
    """Build the program of a last stage with its loss.

    Args:
        engine, loss_engine: of the stage, and of the loss.
        function: the stage with its loss.
        example: ``(params, x, target, *extras)``.
        name, device: of the stage.
        known: the evaluation of stage and loss as one.

    Raises:
        StageError: an engine cannot serve its part.
    """
    stage = StageFunction(partial(_plain, function.fn, name), frozen=function.frozen)
    loss = replace(function, fn=_handed_on, frozen=frozenset())
    params, x, target, *extras = example
    first = engine(stage, (params, x, *extras), has_aux=True, name=name, device=device)
    second = loss_engine(loss, ((), first.y, target), has_aux=True, name="the loss", device=device)
    sizes = [p.residual_bytes for p in (first, second) if p.residual_bytes is not None]
    flat = _in_turn(first, second, len(Signature.of(target).leaves))
    size = sum(sizes) if len(sizes) == 2 else None
    return stage_program(flat, Example.of(example, device), known, has_aux=True, residual_bytes=size)


def _plain(fn: Stage, name: str, params: Any, x: Any, *extras: Any) -> Any:
    """Call the stage; raise StageError for a result that the loss would not get as it is."""
    out = fn(params, x, *extras)
    y = out.y if isinstance(out, Output) else out
    if any(map(is_dtensor, tree_leaves(y))):
        raise StageError(
            name,
            "it returns a DTensor, which only its own engine hands on to the loss",
            "leave out loss_engine, or return x.to_local()",
        )
    return out


def _handed_on(params: tuple[()], x: Any) -> Output:
    y, _, loss = x
    return Output(y, loss)


def _in_turn(first: StageProgram, second: StageProgram, targets: int) -> FlatProgram:
    """Run the program of a stage and that of the loss as one."""
    passed, metrics = len(first.y.leaves), len(children(first.aux)[1].leaves)
    outputs = 1 + len(children(second.aux)[0].leaves)  # and the loss
    carrying = [leaf for leaf in first.y.leaves if leaf.grad]
    weighted = second.y.leaves[0].grad

    def forward(params: Leaves, x: Leaves, extras: Leaves) -> tuple[Leaves, tuple[Any, ...]]:
        of_stage, saved = first.flat.forward(params, x, extras[targets:])
        of_loss, apart = second.flat.forward((), of_stage[:passed], extras[:targets])
        aside = of_stage[passed:]
        results = (*of_loss[:outputs], *aside[:metrics], *of_loss[outputs:], *aside[metrics:])
        return results, (*saved, LossResiduals(apart))

    def pull(backward: Callable[..., Any], residuals: tuple[Any, ...], gy: Leaves) -> Any:
        *saved, apart = residuals
        gradients = second.flat.backward(tuple(apart), gy if weighted else ())[1]
        del residuals, apart
        cotangents = tuple(
            torch.zeros(leaf.shape, dtype=leaf.dtype, device=gy[0].device) if g is None else g
            for leaf, g in zip(carrying, gradients, strict=True)
        )
        return backward(tuple(saved), cotangents)

    return FlatProgram(
        forward,
        partial(pull, first.flat.backward),
        partial(pull, first.flat.backward_input),
        first.flat.backward_weight,
    )
