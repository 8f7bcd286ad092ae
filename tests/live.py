"""Measure the memory of tensors, by their storages."""

from __future__ import annotations

from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef

from ppfunc.stage._torch import TorchDispatchMode, storage
from ppfunc.stage.operators import tensors_in


class Live(TorchDispatchMode):
    """Counts the bytes of the storages made within it that live at once: now, at most, and after the last
    call of each operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[StorageWeakRef, int] = {}
        self.most = 0
        self.after: dict[str, int] = {}

    @property
    def now(self) -> int:
        self._held = {reference: size for reference, size in self._held.items() if not reference.expired()}
        return sum(self._held.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = set(map(storage, tensors_in((args, kwargs))))
        new = (t.untyped_storage() for t in tensors_in(made) if storage(t) not in given)
        self._held.update((StorageWeakRef(memory), memory.nbytes()) for memory in new)
        self.after[func.overloadpacket.__name__] = now = self.now
        self.most = max(self.most, now)
        return made
