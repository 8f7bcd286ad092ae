"""Know the states that a trainer has returned; data ranks compare others before they train on."""

from weakref import ref

from torch import Tensor

from ppfunc.parallel.counts import require_counts
from ppfunc.stage._torch import version
from ppfunc.stage.layout import local
from ppfunc.stage.tree import tree_leaves

from .train_state import TrainState

GOES_ON = "a state that goes on"


class KnownStates:
    """Knows the last state that steps have returned, and the last one that was evaluated.

    Every data rank keeps the same count, since a step ends on all ranks or on none.

    Args:
        every: after how many steps ranks compare what they know; None for never.
    """

    def __init__(self, every: int | None) -> None:
        if every is not None:
            require_counts(checksum_every=every)
        self._every = every
        self._steps = 0  # of all calls that have ended well
        # By whether it was trained: the leaves, how often each was written into, and the failures before.
        self._known: dict[bool, tuple[list[tuple[ref[Tensor], int | None]], int]] = {}

    def known_as(self, state: TrainState, generation: int) -> str:
        """Name a known state that is unchanged, where ``generation`` counts no new failure; else return "".

        Ranks compare the answer: each may know two states.
        """
        leaves = _leaves(state)
        for trained, name in (True, GOES_ON), (False, "the state that was evaluated last"):
            noted, then = self._known.get(trained, ((), None))
            if (
                then == generation
                and len(noted) == len(leaves)
                and all(
                    was() is leaf and count == version(local(leaf))
                    for (was, count), leaf in zip(noted, leaves, strict=True)
                )
            ):
                return name
        return ""

    def note(self, state: TrainState, generation: int, steps: int) -> None:
        """Note the state after so many steps, none of an evaluation."""
        before, self._steps = self._steps, self._steps + steps
        if self._every is not None and before // self._every != self._steps // self._every:
            self._known.pop(True, None)  # the next step compares it
            return
        self._known[steps > 0] = [(ref(leaf), version(local(leaf))) for leaf in _leaves(state)], generation


def _leaves(state: TrainState) -> list[Tensor]:
    return tree_leaves((state.step, state.params, state.optimizer, state.scale))
