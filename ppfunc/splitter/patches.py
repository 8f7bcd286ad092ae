"""Change functions of torch while one thread is recorded: they are the process's, so `process_lock` is held."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Function

from ppfunc.stage import StageError

from .record import BY_HAND, MODEL, Recording, calling_place


@contextmanager
def functions_kept(recording: Recording) -> Iterator[None]:
    """Within it, an ``autograd.Function`` that the recorded thread calls becomes one operator, and keeps its own backward."""
    original = vars(Function)["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        bound = original.__get__(None, cls)
        return recording.call_function(bound, cls, args, kwargs) if recording.here else bound(*args, **kwargs)

    Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Function.apply = original  # type: ignore[method-assign]


@contextmanager
def without_seeding() -> Iterator[None]:
    """Within it, raise where this thread seeds the default generator: without values nothing is drawn, and no seed is kept."""
    this, original = threading.get_ident(), torch.manual_seed

    def manual_seed(seed: int) -> torch.Generator:
        if threading.get_ident() == this:
            reason = f"it seeds the default random generator{calling_place()}, which is not traced"
            raise StageError(MODEL, reason, f"leave that out, or {BY_HAND}")
        return original(seed)

    torch.manual_seed = torch.random.manual_seed = manual_seed
    try:
        yield
    finally:
        torch.manual_seed = torch.random.manual_seed = original
