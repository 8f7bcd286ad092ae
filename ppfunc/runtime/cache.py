"""The cache of a step function: compiled steps by the form of the arguments, bounded."""

import threading
from collections import OrderedDict
from typing import Any, NamedTuple, Self, TypeVar

from ppfunc.stage.errors import warn

from .arguments import StepArguments
from .compile import CompiledStep
from .exchange import Agreed
from .guards import Guards
from .layouts import LaidOut, laid_out

V = TypeVar("V")
Key = tuple[Any, ...]

CACHE_SIZE = 32
"""Most forms of arguments for which one step function keeps compiled programs."""
_RETRACES = 8  # so many forms are unusual enough for a warning
_MODES = 3  # entries of one key that are kept for other modes of the modules


class CacheInfo(NamedTuple):
    """Use of the cache of a step function, as of ``functools.lru_cache``."""

    hits: int
    misses: int
    maxsize: int
    currsize: int


class Entry(NamedTuple):
    """A compiled step, and what it holds for.

    Args:
        compiled: the step.
        guards: tell whether it still holds.
        laid: how its DTensors lie.
    """

    compiled: CompiledStep
    guards: Guards
    laid: LaidOut

    @classmethod
    def of(cls, compiled: CompiledStep, guards: Guards) -> Self:
        return cls(compiled, guards, laid_out(compiled.lowered.form))

    def holds(self, agreed: Agreed | None) -> bool:
        """Whether it holds where the ranks agree on this. Where they agree anew, none may be left out that has kept a program."""
        return self.guards.agreed is agreed and self.guards.hold()


class Entries:
    """Keeps the compiled steps of a step function, for a bounded number of keys; safe to use from several threads.

    Attributes:
        added: how many were added since all were forgotten.
    """

    def __init__(self) -> None:
        self.added = 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[Key, list[Entry]] = OrderedDict()
        self._hits = self._misses = 0

    def find(self, key: Key, agreed: Agreed | None) -> Entry | None:
        """An entry of this key that holds, if there is one."""
        with self._lock:
            return self._found(key, agreed)

    def add(self, key: Key, entry: Entry) -> Entry:
        """Keep a new entry, and return it; or that which another thread has built meanwhile."""
        with self._lock:
            if (built := self._found(key, entry.guards.agreed)) is not None:
                return built
            self._misses += 1
            self.added += 1
            others = [other for other in self._entries.get(key, ()) if other.guards.agreed is entry.guards.agreed]
            keep(self._entries, key, [*others[-_MODES:], entry])
            return entry

    def hit(self) -> None:
        """Count a call that needed no look."""
        self._hits += 1

    def info(self) -> CacheInfo:
        return CacheInfo(self._hits, self._misses, CACHE_SIZE, len(self._entries))

    def forget(self) -> None:
        """Drop every entry; what is counted goes on."""
        with self._lock:
            self._entries.clear()
            self.added = 0

    def clear(self) -> None:
        self.forget()
        self._hits = self._misses = 0

    def _found(self, key: Key, agreed: Agreed | None) -> Entry | None:
        entry = next((entry for entry in self._entries.get(key, ()) if entry.holds(agreed)), None)
        if entry is not None:
            self._hits += 1
            self._entries.move_to_end(key)
        return entry


def keep(cache: OrderedDict[Key, V], key: Key, value: V) -> None:
    """Add to a bounded cache; the least recently used entry goes."""
    cache[key] = value
    cache.move_to_end(key)
    while len(cache) > CACHE_SIZE:
        cache.popitem(last=False)


def warn_of_retraces(name: str, added: int, arguments: StepArguments, last: StepArguments | None) -> None:
    """Warn once that a step function traces again and again, and say what changed."""
    if added != _RETRACES:
        return
    before = {} if last is None else last.trees
    changed = [n for n, form in arguments.trees.items() if n not in before or before[n].key != form.key]
    what = "modules or autocast have another mode, or fewer arguments are given"
    if changed:
        now, then = arguments.trees[changed[0]], before.get(changed[0])
        what = f"{changed[0]} is now {now.signature}"
        what += "" if then is None else f", it was {then.signature}"
        what += ", in memory of another type, layout or device" if then is not None and then.signature == now.signature else ""
    warn(
        f"{name} has been traced {added} times, each for another form of its arguments: {what}; "
        f"pad batches to few shapes, or use the functional engine"
    )
