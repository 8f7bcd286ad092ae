"""Which engine serves a stage that another one refuses: found out by asking them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .errors import StageError


def with_advice(
    refusal: StageError,
    others: tuple[Callable[..., Any], ...],
    fn: Callable[..., Any],
    example: tuple[Any, ...],
    *,
    has_aux: bool,
    name: str,
    device: torch.device | str | None,
) -> StageError:
    """The refusal of an engine, naming the first of the others that serves the stage, if one does."""
    refused = []
    for engine in others:
        try:
            engine(fn, example, has_aux=has_aux, name=name, device=device)
        except StageError as error:
            refused.append(f"the {engine.__name__} engine: {error.reason}")
        else:
            return StageError(refusal.stage, refusal.reason, f"use the {engine.__name__} engine")
    return StageError(refusal.stage, f"{refusal.reason}; no engine serves it ({'; '.join(refused)})", "rewrite what is refused")
