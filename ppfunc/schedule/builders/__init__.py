"""The builders of schedules: one pure function ``(ranks, microbatches, ...) -> Schedule`` each."""

from __future__ import annotations

from collections.abc import Callable

from ..schedule import Schedule
from .gpipe import gpipe
from .inference import inference
from .one_f_one_b import one_f_one_b

BUILDERS: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "inference": inference,
}

__all__ = [f.__name__ for f in BUILDERS.values()] + ["BUILDERS"]
