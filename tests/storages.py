"""Count the bytes of tensors that are alive while a function runs: the storages that operators make."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ppfunc.runtime.ports import _torch
from ppfunc.stage._torch import without_modes
from ppfunc.stage.tree import tree_leaves


def kept_bytes(program: Any, params: Any, *arguments: Any) -> int:
    """Run a forward, and count the bytes that it keeps for its backward, without those of parameters."""
    _, residuals = program.forward(params, *arguments)
    mine = {t.untyped_storage()._cdata for t in tree_leaves(params)}
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tree_leaves(residuals)}
    return sum(size for key, size in sizes.items() if key not in mine)


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of storages that are made within, each once, from the operator to its release.

    One that is resized counts no more.

    Args:
        others: tensors whose storages are not counted: parameters, the batch.

    Attributes:
        live: bytes alive now.
        peak: the most that were alive at once.
        at: the operator that made the peak.
    """

    def __init__(self, others: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.at = ""
        self._known = {t.untyped_storage()._cdata: None for t in others}
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __enter__(self) -> Self:
        self._patches = ExitStack()
        resize = torch.UntypedStorage.resize_
        self._patches.enter_context(
            patch.object(torch.UntypedStorage, "resize_", lambda *args: self._resized(resize, *args))
        )
        for name in ("all_gather", "reduce_scatter"):
            self._patches.enter_context(patch.object(_torch, name, _uncounted(getattr(_torch, name))))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def _resized(self, resize: Callable[..., Any], storage: Any, size: int) -> Any:
        if (key := storage._cdata) in self._alive:
            self._release(key)
        return resize(storage, size)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.layout is torch.strided:
                self._note(t.untyped_storage(), str(func))
        return result

    def _note(self, storage: Any, operator: str) -> None:
        key = storage._cdata
        if key in self._known or key in self._alive:
            return
        size = storage.nbytes()
        self._alive[key] = weakref.ref(storage, lambda _: self._release(key)), size
        self.live += size
        if self.live > self.peak:
            self.peak, self.at = self.live, operator

    def _release(self, key: int) -> None:
        self.live -= self._alive.pop(key)[1]


def _uncounted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Leave out the copies that gloo makes for its own use, and frees in its own time."""

    def call(*args: Any) -> Any:
        with without_modes():
            return function(*args)

    return call
