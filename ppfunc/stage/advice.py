"""Which engine serves a stage that another one refuses: found out by asking it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .errors import StageError


def with_advice(
    refusal: StageError,
    other: Callable[..., Any],
    fn: Callable[..., Any],
    example: tuple[Any, ...],
    *,
    has_aux: bool,
    name: str,
    device: torch.device | str | None,
) -> StageError:
    """The refusal of an engine, naming one that serves the stage: ``other``, or one that ``other`` names."""
    try:
        other(fn, example, has_aux=has_aux, name=name, device=device)
    except StageError as error:
        if error.instead.startswith("use the "):
            return StageError(refusal.stage, refusal.reason, error.instead)
        if "engine" not in refusal.instead:
            return refusal  # it is the stage itself that fails
        reason = f"{refusal.reason}; the {other.__name__} engine refuses it too: {error.reason}"
        return StageError(refusal.stage, reason, error.instead)
    return StageError(refusal.stage, refusal.reason, f"use the {other.__name__} engine")
