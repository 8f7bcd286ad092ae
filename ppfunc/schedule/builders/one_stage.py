"""Build schedules of one stage per rank: GPipe, 1F1B, ZB-H1, ZB-H2, inference.

Their orders, and the form of a schedule of one chain, serve other builders as well.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from ppfunc._checks import naming_arguments, require_counts
from ppfunc.parallel.placement import Placement, loop

from ..instruction import B, F, I, Instruction, W
from ..schedule import Schedule, single_chain


@naming_arguments
def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Run all forwards, then all backwards, both in the order of the microbatches.

    Bubble time ``(p - 1)(F + B)``; ``m`` live activations on every rank.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(gpipe(ranks=3, microbatches=4)), end="")
    rank 0  0F0 0F1 0F2 0F3  .   .   .   .  0B0 0B1 0B2 0B3
    rank 1   .  1F0 1F1 1F2 1F3  .   .  1B0 1B1 1B2 1B3  .
    rank 2   .   .  2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3  .   .

    Args:
        ranks: number of ranks p, one stage each.
        microbatches: number of microbatches m.

    Raises:
        ValueError: an argument is below 1.

    References:
        Huang et al., GPipe, NeurIPS 2019 (arXiv:1811.06965), section 2.3.
    """
    return rank_by_rank(
        "gpipe",
        loop(ranks),
        ranks,
        microbatches,
        lambda r: (op(r, m) for op in (F, B) for m in range(microbatches)),
    )


@naming_arguments
def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Run warm-up forwards by distance from the last rank, then forward and backward in turn.

    Bubble time ``(p - 1)(F + B)``, of the makespan ``(p - 1) / (m + p - 1)``; at most
    ``min(p - r, m)`` live activations on rank r.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(one_f_one_b(ranks=3, microbatches=5)), end="")
    rank 0  0F0 0F1 0F2  .   .  0B0 0F3 0B1 0F4 0B2  .  0B3  .  0B4
    rank 1   .  1F0 1F1  .  1B0 1F2 1B1 1F3 1B2 1F4 1B3  .  1B4  .
    rank 2   .   .  2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4  .   .

    Args:
        ranks: number of ranks p, one stage each.
        microbatches: number of microbatches m.

    Raises:
        ValueError: an argument is below 1.

    References:
        Narayanan et al., PipeDream-flush (arXiv:2006.09503), section 2; Fan et al., DAPPLE, PPoPP 2021.
    """

    def program_of(r: int) -> Iterator[Instruction]:
        walk = range(microbatches)
        return alternate([F(r, m) for m in walk], [[B(r, m)] for m in walk], ranks - 1 - r)

    return rank_by_rank("1f1b", loop(ranks), ranks, microbatches, program_of)


@naming_arguments
def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Run forwards and input gradients as in 1F1B; rank r starts weight gradients after r + 1 of them.

    Bubble time ``(p - 1)(F + I - W)`` where ``m >= p`` and W <= I; on every rank at most p
    activations wait for their W.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(zb_h1(ranks=3, microbatches=5)), end="")
    rank 0  0F0 0F1 0F2  .   .  0I0 0W0 0F3 0I1 0W1 0F4 0I2 0W2 0I3 0W3 0I4 0W4
    rank 1   .  1F0 1F1  .  1I0 1F2 1I1 1W0 1F3 1I2 1W1 1F4 1I3 1W2 1I4 1W3 1W4
    rank 2   .   .  2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2F4 2I4 2W2 2W3 2W4

    Args:
        ranks: number of ranks p, one stage each.
        microbatches: number of microbatches m.

    Raises:
        ValueError: an argument is below 1.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv:2401.10241), section 2.1.
    """
    return _zero_bubble("zb_h1", ranks, microbatches, 1)


@naming_arguments
def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Double the warm-up of 1F1B, and delay weight gradients twice as long as ZB-H1: a parallelogram.

    Bubble time ``(p - 1)(F + I - 2W)`` of the span, none where F = I = W; at most ``2p - 1``
    activations wait for their W. The ranks end one after another: the optimizer step must not
    be a barrier, or the last rank's start is waited for.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(zb_h2(ranks=3, microbatches=6)), end="")
    rank 0  0F0 0F1 0F2 0F3 0F4 0I0 0W0 0F5 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5  .   .
    rank 1   .  1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1F5 1I3 1W1 1I4 1W2 1I5 1W3 1W4 1W5  .
    rank 2   .   .  2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2F5 2I5 2W1 2W2 2W3 2W4 2W5

    Args:
        ranks: number of ranks p, one stage each.
        microbatches: number of microbatches m.

    Raises:
        ValueError: an argument is below 1.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv:2401.10241), section 2.2.
    """
    return _zero_bubble("zb_h2", ranks, microbatches, 2)


def _zero_bubble(name: str, ranks: int, microbatches: int, times: int) -> Schedule:
    """Warm up ``times`` as long as 1F1B, and delay weight gradients by ``times * r`` input gradients."""

    def program_of(r: int) -> Iterator[Instruction]:
        walk = range(microbatches)
        warm_up, delay = times * (ranks - 1 - r), times * r
        return delayed_weights([F(r, m) for m in walk], [(r, m) for m in walk], warm_up, delay)

    return rank_by_rank(name, loop(ranks), ranks, microbatches, program_of)


@naming_arguments
def inference(ranks: int, microbatches: int) -> Schedule:
    """Run the forwards of all microbatches in order, and no backward.

    Bubble time ``(p - 1)F``; nothing is kept for a backward.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(inference(ranks=3, microbatches=4)), end="")
    rank 0  0F0 0F1 0F2 0F3  .   .
    rank 1   .  1F0 1F1 1F2 1F3  .
    rank 2   .   .  2F0 2F1 2F2 2F3

    Args:
        ranks: number of ranks p, one stage each.
        microbatches: number of microbatches m.

    Raises:
        ValueError: an argument is below 1.

    References:
        Huang et al., GPipe, NeurIPS 2019 (arXiv:1811.06965), section 2.3.
    """
    return rank_by_rank(
        "inference", loop(ranks), ranks, microbatches, lambda r: (F(r, m) for m in range(microbatches))
    )


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
