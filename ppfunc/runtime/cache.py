"""The cache of a step function: compiled steps by the form of the arguments, bounded."""

from collections import OrderedDict
from typing import Any, NamedTuple, Self, TypeVar

from ppfunc.stage.errors import warn

from .arguments import StepArguments
from .compile import CompiledStep
from .exchange import Agreed
from .guards import Guards
from .layouts import LaidOut, laid_out

V = TypeVar("V")

CACHE_SIZE = 32
"""Most forms of arguments for which one step function keeps compiled programs."""
RETRACES = 8
"""So many forms are unusual enough for a warning."""


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


def keep(cache: OrderedDict[tuple[Any, ...], V], key: tuple[Any, ...], value: V) -> None:
    """Add to a bounded cache; the least recently used entry goes."""
    cache[key] = value
    cache.move_to_end(key)
    while len(cache) > CACHE_SIZE:
        cache.popitem(last=False)


def warn_of_retraces(name: str, misses: int, arguments: StepArguments, last: StepArguments | None) -> None:
    """Warn that a step function traces again and again, and say what changed."""
    before = {} if last is None else last.trees
    changed = [n for n, form in arguments.trees.items() if n not in before or before[n].key != form.key]
    what = "modules or autocast have another mode, or fewer arguments are given"
    if changed:
        now, then = arguments.trees[changed[0]], before.get(changed[0])
        what = f"{changed[0]} is now {now.signature}"
        what += "" if then is None else f", it was {then.signature}"
        what += ", in memory of another type, layout or device" if then is not None and then.signature == now.signature else ""
    warn(
        f"{name} has been traced {misses} times, each for another form of its arguments: {what}; "
        f"pad batches to few shapes, or use the functional engine"
    )
