"""Guard a lowered step: notice that modules, frozen parameters or autocast are no longer as they were."""

from collections.abc import Hashable
from typing import NamedTuple, Self

from ppfunc.stage import Outline, Stage
from ppfunc.stage.module import frozen_below

from .exchange import Agreed
from .lowered import LoweredStep
from .stage_programs import autocast, modes
from .transport import Mode


class Guards(NamedTuple):
    """Facts under which a step was lowered, beside the form of its arguments; it holds while they do.

    Args:
        modes: of its modules, by outline of a stage.
        frozen: names of the parameters that its stages do not differentiate.
        autocast: which was on.
        agreed: what the ranks agreed on for it.
    """

    modes: tuple[tuple[Outline, tuple[bool, ...]], ...]
    frozen: tuple[tuple[Stage, list[str]], ...]
    autocast: tuple[Hashable, ...]
    agreed: Agreed

    @classmethod
    def now(cls, lowered: LoweredStep, agreed: Agreed) -> Self:
        """Guards of a step that is lowered now."""
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
