"""Refuse draws from the generators of Python and numpy, which no seed of a step reaches."""

import os
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TypeVar

import torch

from ..errors import StageError, place_of_call
from ..process import process_lock

T = TypeVar("T")

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


def without_foreign_draws(call: Callable[[], T], name: str, *, repeatable: bool = True) -> T:
    """Return ``call()``, which evaluates a stage; raise if it draws from Python's or numpy's generator.

    What is not seen: draws from a generator of one's own, and by a function that was imported from
    ``numpy.random`` by its name.

    Args:
        call: evaluates the stage. It has no effects; it may be called twice, and the second result is
            returned.
        name: how errors call the stage.
        repeatable: whether it may be called twice. If so, draws are watched in the second call only, which is
            made if the generators have changed: watching takes time. Another thread may have changed them.

    Raises:
        StageError: it draws from the generator of ``random``, or of ``numpy.random``.
    """
    if repeatable:
        before = _states()
        result = call()
        if _states() == before:
            return result
    with _draws_seen() as seen:
        result = call()
    if seen:
        reason = (
            f"it draws from the generator of {seen[0]}, whose numbers depend on the order in which"
            " microbatches run"
        )
        raise StageError(
            name,
            reason,
            "draw by torch, whose generator seed=(seed, step) sets, or give the numbers as inputs",
        )
    return result


def _draw_functions() -> Iterator[tuple[ModuleType, str]]:
    """List the functions that use the generators of ``random``, and of ``numpy.random`` if imported."""
    numpy = sys.modules.get("numpy.random")
    for module, kind in ((random, "Random"), *([] if numpy is None else [(numpy, "RandomState")])):
        for name, function in vars(module).items():
            if isinstance(getattr(function, "__self__", None), getattr(module, kind)) and name not in (
                "getstate",
                "get_state",
            ):
                yield module, name


def _states() -> bytes:
    """Return the states of both generators, to compare."""
    numpy = sys.modules.get("numpy.random")
    return pickle.dumps((random.getstate(), numpy and numpy.get_state(legacy=False)))


def _by_torch(frame: FrameType | None) -> bool:
    """Tell whether torch draws for itself: the innermost frame outside ``random`` and this module."""
    while frame is not None and frame.f_code.co_filename in (random.__file__, __file__):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH)


@contextmanager
def _draws_seen() -> Iterator[list[str]]:
    """List the calls by which this thread draws.

    A profile function sees those of ``random`` by whatever name they are called, unless a profiler is at
    work. It does not see numpy's, so the functions of both modules are replaced as well. Draws of torch for
    its own names do not count.
    """
    this, seen, generator = threading.get_ident(), list[str](), getattr(random.random, "__self__", None)

    def note(frame: Any, event: str, function: Any) -> None:
        draw = (
            event == "c_call"
            and getattr(function, "__self__", None) is generator
            and function.__name__ != "getstate"
        )
        if draw and not _by_torch(frame):
            seen.append(f"random ({function.__name__}{place_of_call()})")

    def noting(original: Callable[..., Any], what: str) -> Callable[..., Any]:
        @wraps(original)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == this and not _by_torch(sys._getframe(1)):
                seen.append(f"{what}{place_of_call()})")
            return original(*args, **kwargs)

        return noted

    with process_lock:
        originals = [(module, name, getattr(module, name)) for module, name in _draw_functions()]
        for module, name, original in originals:
            setattr(module, name, noting(original, f"{module.__name__} ({name}"))
        alone = sys.getprofile() is None
        if alone:
            sys.setprofile(note)
        try:
            yield seen
        finally:
            if alone:
                sys.setprofile(None)
            for module, name, original in originals:
                setattr(module, name, original)
