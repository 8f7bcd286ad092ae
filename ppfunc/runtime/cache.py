"""The cache of a step function: compiled steps by the form of the arguments, bounded."""

from collections import OrderedDict
from typing import Any, NamedTuple, Self, TypeVar

from ppfunc.stage import Outline, Stage
from ppfunc.stage.errors import warn
from ppfunc.stage.module import frozen_in

from .arguments import StepArguments
from .compile import CompiledStep
from .layouts import LaidOut, laid_out
from .stage_programs import autocast, modes
from .transport import LossPart, Mode

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
        modes: of its modules.
        frozen: the parameters that its stages do not differentiate.
        parts: the form of the losses of all ranks.
        laid: how its DTensors lie.
    """

    compiled: CompiledStep
    modes: tuple[tuple[Outline, tuple[bool, ...]], ...]
    frozen: tuple[tuple[Stage, list[str]], ...]
    parts: dict[int, LossPart]
    laid: LaidOut

    @classmethod
    def of(cls, compiled: CompiledStep, parts: dict[int, LossPart]) -> Self:
        """The entry of a step compiled in the present modes."""
        outlines = {id(low.outline): low.outline for low in compiled.lowered.stages.values()}.values()
        functions = {id(low.function.fn): low.function.fn for low in compiled.lowered.stages.values()}.values()
        frozen = tuple((fn, frozen_in(fn)) for fn in functions)
        return cls(compiled, tuple((outline, modes(outline)) for outline in outlines), frozen, parts, laid_out(compiled.lowered.form))

    def holds(self) -> bool:
        """Whether every module that ran in it is in the mode in which it was traced, and the same parameters are frozen."""
        return all(modes(outline) == before for outline, before in self.modes) and all(frozen_in(fn) == names for fn, names in self.frozen)

    def mode(self) -> Mode:
        """The mode of all of them."""
        found = {mode for _, every in self.modes for mode in every}
        return "mixed" if len(found) != 1 else "training" if found.pop() else "evaluation"


class Last(NamedTuple):
    """A step with what it was compiled for: the arguments without their tensors, the name of the batch, autocast."""

    arguments: StepArguments
    name: str
    autocast: tuple[Any, ...]
    entry: Entry

    @classmethod
    def of(cls, arguments: StepArguments, name: str, entry: Entry) -> Self:
        """A step for these arguments under the present autocast."""
        bare = arguments._replace(params={}, state={}, inputs=(), targets=(), extras={}, scale=None, update_state=None)
        return cls(bare, name, autocast(), entry)

    def require_same_modes(self) -> None:
        """Raise ValueError where modules or autocast have another mode than then, or other parameters are frozen."""
        if self.autocast != autocast() or not self.entry.holds():
            raise ValueError(
                "modules or autocast have another mode than when the step was lowered, or other parameters are frozen; "
                "lower and compile it again"
            )


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
