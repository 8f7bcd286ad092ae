"""The cache of a step function: compiled steps by the form of the arguments, bounded."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, NamedTuple, Self, TypeVar

from ppfunc.stage import Outline, Stage
from ppfunc.stage.errors import warn
from ppfunc.stage.module import frozen_below

from .arguments import StepArguments
from .compile import CompiledStep
from .exchange import Agreed
from .layouts import LaidOut, laid_out
from .lowered import LoweredStep
from .stage_programs import autocast, modes
from .transport import Mode

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


class Conditions(NamedTuple):
    """Conditions under which a lowered step holds, beside the form of its arguments.

    Args:
        modes: of its modules.
        frozen: the parameters that its stages do not differentiate.
        autocast: which is on.
        agreed: what the ranks agreed on for it.
    """

    modes: tuple[tuple[Outline, tuple[bool, ...]], ...]
    frozen: tuple[tuple[Stage, list[str]], ...]
    autocast: tuple[Hashable, ...]
    agreed: Agreed

    @classmethod
    def now(cls, lowered: LoweredStep, agreed: Agreed) -> Self:
        """Those under which a step is lowered now."""
        outlines = {id(low.outline): low.outline for low in lowered.stages.values()}.values()
        functions = {id(low.function.fn): low.function.fn for low in lowered.stages.values()}.values()
        frozen = tuple((fn, frozen_below(fn)) for fn in functions)
        return cls(tuple((outline, modes(outline)) for outline in outlines), frozen, autocast(), agreed)

    def hold(self) -> bool:
        """Whether modules and autocast are in the modes of then, and the same parameters are frozen."""
        return (
            self.autocast == autocast()
            and all(modes(outline) == before for outline, before in self.modes)
            and all(frozen_below(fn) == names for fn, names in self.frozen)
        )

    def require(self) -> None:
        """Raise ValueError where they do not hold."""
        if not self.hold():
            raise ValueError(
                "modules or autocast have another mode than when the step was lowered, or other parameters are frozen; "
                "lower and compile it again"
            )

    def mode(self) -> Mode:
        """The mode of all modules."""
        found = {mode for _, every in self.modes for mode in every}
        return "mixed" if len(found) != 1 else "training" if found.pop() else "evaluation"


class Entry(NamedTuple):
    """A compiled step, and what it holds for.

    Args:
        compiled: the step.
        conditions: under which it was lowered.
        laid: how its DTensors lie.
    """

    compiled: CompiledStep
    conditions: Conditions
    laid: LaidOut

    @classmethod
    def of(cls, compiled: CompiledStep, conditions: Conditions) -> Self:
        return cls(compiled, conditions, laid_out(compiled.lowered.form))

    def holds(self, agreed: Agreed | None) -> bool:
        """Whether it holds where the ranks agree on this. Where they agree anew, none may be left out that has kept a program."""
        return self.conditions.agreed is agreed and self.conditions.hold()


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
