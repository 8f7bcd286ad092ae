"""The graph engine: forward and backward traced once, cut by dependency, run as plain functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .abstract import outline
from .errors import StageError
from .example import Example
from .primals import Primals
from .program import FlatProgram, StageProgram, stage_program
from .tracing.clean import clean
from .tracing.cut import Parts, cut, residual_bytes
from .tracing.emit import emit
from .tracing.joint import Joint, trace


def graph(
    fn: Callable[..., Any],
    example: tuple[Any, ...],
    *,
    has_aux: bool = False,
    name: str = "the stage",
    device: torch.device | str | None = None,
) -> StageProgram:
    """An engine: traces the stage once and cuts the trace in F, I and W."""
    seen = Example.of(example, device)
    if seen.subclasses:
        reason = f"its example has tensors of the types {', '.join(seen.subclasses)}, which are not traced"
        raise StageError(name, reason, "use the eager engine")
    known = outline(fn, seen, has_aux=has_aux, name=name)
    joint = clean(trace(Primals(fn, seen, known, has_aux, name), seen, known, name))
    parts = cut(joint)
    size = residual_bytes(joint, parts.forward.results[1])
    return stage_program(_emit(parts, joint, name), seen, known, has_aux=has_aux, residual_bytes=size)


def _emit(parts: Parts, joint: Joint, name: str) -> FlatProgram:
    constants = joint.constants
    weight = emit(parts.backward_weight, ("rest",), constants, f"{name} backward_weight")
    return FlatProgram(
        emit(parts.forward, ("params", "x", "consts"), constants, f"{name} forward", settle=("x", "consts")),
        emit(parts.backward, ("residuals", "gy"), constants, f"{name} backward", settle=("gy",)),
        emit(parts.backward_input, ("residuals", "gy"), constants, f"{name} backward_input", settle=("gy",)),
        weight,
    )
