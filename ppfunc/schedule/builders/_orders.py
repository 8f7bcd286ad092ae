"""Share among builders the form of a schedule, the check of arguments, and the orders of 1F1B."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from ppfunc._checks import require_counts
from ppfunc.parallel.placement import Placement

from ..instruction import I, Instruction, W
from ..schedule import Schedule, single_chain


def rank_by_rank(
    name: str,
    placement: Placement,
    ranks: int,
    microbatches: int,
    program_of: Callable[[int], Iterable[Instruction]],
) -> Schedule:
    """Make the schedule of one chain in which rank r runs ``program_of(r)``."""
    require_counts(microbatches=microbatches)
    return single_chain(name, placement, microbatches, map(program_of, range(ranks)))


def require(name: str, got: object, holds: bool, expected: str, mend: str) -> None:
    """Raise ValueError with the argument's name, value, what was expected and how to mend it."""
    if not holds:
        raise ValueError(f"{name} = {got!r}, expected {expected}: {mend}")


def alternate(
    forwards: Sequence[Instruction], backwards: Iterable[Sequence[Instruction]], warm_up: int
) -> Iterator[Instruction]:
    """Run ``warm_up`` forwards, then a forward and a backward in turn, then the remaining backwards."""
    yield from forwards[:warm_up]
    for k, backward in enumerate(backwards):
        yield from forwards[warm_up + k : warm_up + k + 1]
        yield from backward


def delayed_weights(
    forwards: Sequence[Instruction], backwards: Sequence[tuple[int, int]], warm_up: int, delay: int
) -> Iterator[Instruction]:
    """Alternate forwards and input gradients, the weight gradients some input gradients late.

    Args:
        forwards: the forwards in order.
        backwards: ``(stage, microbatch)`` of the input gradients in order; the weight gradients follow it.
        warm_up: forwards before the first input gradient's own.
        delay: input gradients whose weight gradient is still to be done in the steady state.
    """
    late: list[list[Instruction]] = [[]] * delay + [[W(*backward)] for backward in backwards]
    pairs = zip(backwards, late, strict=False)
    yield from alternate(forwards, [[I(*backward), *weight] for backward, weight in pairs], warm_up)
    yield from (weight for weights in late[len(backwards) :] for weight in weights)
