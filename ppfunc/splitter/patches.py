"""Change functions of torch and Python while one thread is recorded.

They are the process's, so `process_lock` is held.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import _lru_cache_wrapper, partial, wraps
from typing import Any

import torch
from torch.autograd import Function
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode

from ppfunc.stage import StageError
from ppfunc.stage._torch import ASSIGNS_DATA, SETS_REQUIRES_GRAD

from ._torch import check_values
from .record import BY_HAND, MODEL, Recording, calling_place

# Functions that no operator records: owner, name, effect on the model, replacement.
_UNSEEN = (
    (torch, "manual_seed", "seeds the default random generator", "leave that out"),
    (torch.random, "manual_seed", "seeds the default random generator", "leave that out"),
    *(
        (
            torch.Tensor,
            name,
            f"puts a hook onto the gradient of a tensor ({name})",
            "write an autograd.Function",
        )
        for name in ("register_hook", "register_post_accumulate_grad_hook")
    ),
)


@contextmanager
def functions_kept(recording: Recording) -> Iterator[None]:
    """Make each ``autograd.Function`` that the recorded thread calls one operator with its own backward."""
    original = vars(Function)["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        bound = original.__get__(None, cls)
        return recording.call_function(bound, cls, args, kwargs) if recording.here else bound(*args, **kwargs)

    with _replaced(Function, "apply", classmethod(apply)):
        yield


def uncompiled() -> AbstractContextManager[Any]:
    """Call functions that ``torch.compile`` has made as the Python that they were made of."""
    known = "torch._dynamo" in sys.modules  # nothing is compiled without it, and its import is slow
    return torch.compiler.set_stance("force_eager") if known else nullcontext()


@contextmanager
def unseen_refused() -> Iterator[None]:
    """Refuse actions that no operator records: seeds, hooks onto a gradient.

    Other threads are left alone.
    """
    this = threading.get_ident()

    def refusing(original: Callable[..., Any], what: str, mend: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == this:
                raise StageError(
                    MODEL, f"it {what}{calling_place()}, which is not traced", f"{mend}, or {BY_HAND}"
                )
            return original(*args, **kwargs)

        return refuse

    with ExitStack() as stack:
        for owner, name, what, mend in _UNSEEN:
            stack.enter_context(_replaced(owner, name, refusing(getattr(owner, name), what, mend)))
        yield


@contextmanager
def values_unchecked() -> Iterator[None]:
    """Skip checks of values in this thread: ``torch._check``, and those of distributions' arguments."""
    this = threading.get_ident()

    def check(*args: Any, **kwargs: Any) -> None:
        if threading.get_ident() != this:
            check_values(*args, **kwargs)

    with _replaced(torch, check_values.__name__, check), _replaced(Distribution, "_validate_args", False):
        yield


class AssignedAttributes(TorchFunctionMode):
    """Sees assignments to attributes of tensors, which are no operators.

    ``requires_grad`` may be asked of a value that has a gradient, such as a view of an input, where torch
    takes leaves alone; ``data`` is refused.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == ASSIGNS_DATA:
            raise StageError(
                MODEL,
                f"it assigns to the data of a tensor{calling_place()}, which is not traced",
                f"make a new tensor, or {BY_HAND}",
            )
        asks = func in (torch.Tensor.requires_grad_, SETS_REQUIRES_GRAD)
        known = asks and all(args[1:]) and all(kwargs.values()) and args[0].grad_fn is not None
        return args[0] if known else func(*args, **kwargs)


@contextmanager
def caches_emptied(values: Iterable[Any]) -> Iterator[None]:
    """Empty the caches (``functools.lru_cache``) among these that are filled: with tensors without values."""
    misses = {cache: cache.cache_info().misses for cache in values if isinstance(cache, _lru_cache_wrapper)}
    try:
        yield
    finally:
        for cache, before in misses.items():
            if cache.cache_info().misses != before:
                cache.cache_clear()


@contextmanager
def noted(model: torch.nn.Module, names: Iterable[str], note: Callable[[str], object]) -> Iterator[None]:
    """Call ``note`` with the name of each module when this thread first calls it, or its ``forward``."""
    this, left = threading.get_ident(), set(names)

    def begin(name: str) -> None:
        if threading.get_ident() == this and name in left:
            left.remove(name)
            note(name)

    with ExitStack() as stack:
        for name in sorted(left):
            module = model.get_submodule(name)
            handle = module.register_forward_pre_hook(lambda *_, name=name: begin(name), prepend=True)
            stack.callback(handle.remove)
            # Some models call it directly, past all hooks.
            stack.enter_context(_replaced(module, "forward", _after(partial(begin, name), module.forward)))
        yield


def _after(begin: Callable[[], None], forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def begun(*args: Any, **kwargs: Any) -> Any:
        begin()
        return forward(*args, **kwargs)

    return begun


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = dict(vars(owner))
    setattr(owner, name, value)
    try:
        yield
    finally:
        if name in before:
            setattr(owner, name, before[name])
        else:
            delattr(owner, name)
