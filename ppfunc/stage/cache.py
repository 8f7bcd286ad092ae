"""Programs kept by what they were built for."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from .example import Example
from .program import Engine, StageProgram


def cached(engine: Engine) -> Engine:
    """``engine``, building one program per stage function and signature of its arguments.

    Stages that share their function and their shapes share their program, which is then called by
    the name of the first. The programs live as long as the returned engine: nothing is global.

    Args:
        engine: any engine.

    >>> calls = []
    >>> def count(fn, example, *, name, **options):
    ...     calls.append(name)
    >>> engine, x = cached(count), torch.zeros(2)
    >>> for name, t in [("stage 0", x), ("stage 1", x + 1), ("stage 2", torch.zeros(3))]:
    ...     engine(len, ((), t), name=name)
    >>> calls
    ['stage 0', 'stage 2']
    """
    programs: dict[Hashable, StageProgram] = {}

    def build(
        fn: Callable[..., Any],
        example: tuple[Any, ...],
        *,
        has_aux: bool = False,
        name: str = "the stage",
        device: torch.device | str | None = None,
    ) -> StageProgram:
        key = (
            fn,
            Example.of(example, device),
            has_aux,
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"),
        )
        if key not in programs:
            programs[key] = engine(fn, example, has_aux=has_aux, name=name, device=device)
        return programs[key]

    return build
