"""Build schedules by patterns that do not depend on costs.

Stages are dealt round the ranks, one each or several: GPipe, 1F1B, ZB-H1, ZB-H2, inference, interleaved and
breadth first, and slices of sequences. Or they go up and down the ranks in a V, or both ways at once; or the
instructions are those of DeepSpeed.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from ppfunc._checks import naming_arguments, require_counts
from ppfunc.parallel.topology import Placement, loop, v_shape

from ..instruction import TAIL, B, F, I, Instruction, Op, W, overlap
from ..schedule import Flow, Schedule, Step, by_place, single_chain


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


@naming_arguments
def interleaved_1f1b(ranks: int, microbatches: int, chunks: int = 2, group: int | None = None) -> Schedule:
    """Run 1F1B over chunks: a rank takes a group of microbatches through one chunk, then the next.

    Bubble time ``(p - 1)(F + B)/v`` where m is a multiple of p; ``(v - 1)p + 2(p - 1) + 1``
    live chunk activations on rank 0.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(interleaved_1f1b(ranks=2, microbatches=4)), end="")
    rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1  .  2B2  .  2B3 0B2 0B3
    rank 1   .  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3  .

    Args:
        ranks: number of ranks p.
        microbatches: number of microbatches m.
        chunks: stages per rank v; rank r holds stages r, r + p, ...
        group: microbatches of a group N; by default m in ``max(1, m // p)`` equal groups, or
            where m does not divide so, p, the last group being smaller, if that does not stall.

    Raises:
        ValueError: an argument below 1, or a group with which the pipeline would stall.

    References:
        Narayanan et al., Megatron-LM, SC 2021 (arXiv:2104.04473), section 2.2.
    """
    require_counts(ranks=ranks, microbatches=microbatches, chunks=chunks)
    size = group_size(ranks, microbatches, chunks, group)
    order = walk(microbatches, chunks, size)

    def program_of(r: int) -> Iterator[Instruction]:
        forwards = [F(chunk * ranks + r, m) for chunk, m in order]
        backwards = [[B((chunks - 1 - chunk) * ranks + r, m)] for chunk, m in order]
        return alternate(forwards, backwards, 2 * (ranks - 1 - r) + (chunks - 1) * size)

    return rank_by_rank("interleaved_1f1b", loop(ranks, chunks), ranks, microbatches, program_of)


@naming_arguments
def interleaved_zb(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Run interleaved 1F1B with a shorter warm-up; weight gradients start r input gradients late.

    Rank r warms up with ``p - 1 - r + (v - 1)N`` forwards, N the size of a group, and does the
    weight gradients in the order of the input gradients. Bubble time ``(p - 1)(F + I - W)/v``
    where ``m >= p`` divides in groups of equal size and W <= I; at most ``p + (v - 1)N`` chunk
    activations wait for their W.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(interleaved_zb(ranks=2, microbatches=3)), end="")
    rank 0  0F0 0F1 0F2 2F0 2F1  .  2I0 2W0 2F2 2I1 2W1 2I2 2W2 0I0 0W0 0I1 0W1 0I2 0W2
    rank 1   .  1F0 1F1 1F2 3F0 3I0 3F1 3I1 3W0 3F2 3I2 3W1 1I0 3W2 1I1 1W0 1I2 1W1 1W2

    Args:
        ranks: number of ranks p.
        microbatches: number of microbatches m.
        chunks: stages per rank v; rank r holds stages r, r + p, ...

    Raises:
        ValueError: an argument is below 1.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv:2401.10241), section 2;
        Narayanan et al., Megatron-LM, SC 2021, section 2.2.
    """
    require_counts(ranks=ranks, microbatches=microbatches, chunks=chunks)
    size = group_size(ranks, microbatches, chunks)
    order = walk(microbatches, chunks, size)

    def program_of(r: int) -> Iterator[Instruction]:
        forwards = [F(chunk * ranks + r, m) for chunk, m in order]
        backwards = [((chunks - 1 - chunk) * ranks + r, m) for chunk, m in order]
        return delayed_weights(forwards, backwards, ranks - 1 - r + (chunks - 1) * size, delay=r)

    return rank_by_rank("interleaved_zb", loop(ranks, chunks), ranks, microbatches, program_of)


@naming_arguments
def looped_bfs(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Run all forwards chunk by chunk, then all backwards, chunks and microbatches reversed.

    Bubble time ``(p - 1)(F + B)/v`` where ``m >= p``; ``m v`` live chunk activations.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(looped_bfs(ranks=2, microbatches=3)), end="")
    rank 0  0F0 0F1 0F2 2F0 2F1 2F2  .   .  2B2 2B1 2B0 0B2 0B1 0B0
    rank 1   .  1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0  .

    Args:
        ranks: number of ranks p.
        microbatches: number of microbatches m.
        chunks: stages per rank v; rank r holds stages r, r + p, ...

    Raises:
        ValueError: an argument is below 1.

    References:
        Lamy-Poirier, Breadth-First Pipeline Parallelism, MLSys 2023 (arXiv:2211.05953), section 4.
    """

    def program_of(r: int) -> list[Instruction]:
        order = [(chunk * ranks + r, m) for chunk, m in walk(microbatches, chunks, microbatches)]
        return [*(F(*place) for place in order), *(B(*place) for place in reversed(order))]

    return rank_by_rank("looped_bfs", loop(ranks, chunks), ranks, microbatches, program_of)


def rank_by_rank(
    name: str,
    placement: Placement,
    ranks: int,
    microbatches: int,
    program_of: Callable[[int], Iterable[Instruction]],
    slices: int = 0,
) -> Schedule:
    """Make the schedule of one chain in which rank r runs ``program_of(r)``."""
    require_counts(microbatches=microbatches)
    return single_chain(name, placement, microbatches, map(program_of, range(ranks)), slices=slices)


def require(name: str, got: object, holds: bool, expected: str, mend: str) -> None:
    """Raise ValueError with the argument's name, its value, the expected value and the mend."""
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


def walk(microbatches: int, chunks: int, group: int) -> list[tuple[int, int]]:
    """List ``(chunk, microbatch)`` of the k-th forward of every rank; the last group may be smaller.

    >>> walk(microbatches=3, chunks=2, group=2)
    [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]
    """
    firsts = range(0, microbatches, group)
    return [(c, m) for g in firsts for c in range(chunks) for m in range(g, min(g + group, microbatches))]


def group_size(ranks: int, microbatches: int, chunks: int, group: int | None = None, slices: int = 1) -> int:
    """Return the number of microbatches that a rank runs through one chunk before it takes the next.

    Where ``group`` is None: an even division in ``max(1, m // p)`` groups where there is one,
    else the smallest size from p upwards that does not stall, of whole sequences of ``slices``.

    Raises:
        ValueError: a size below 1, or one with which ranks would wait for each other for ever.
    """
    groups = max(1, microbatches // ranks)
    if group is None and microbatches % (groups * slices) == 0:
        return microbatches // groups
    if group is None:
        sizes = (n for n in range(ranks, microbatches + 1) if n % slices == 0)
        return next(n for n in sizes if not _stalls(ranks, microbatches, chunks, n))
    require_counts(group=group)
    require(
        "group",
        group,
        not _stalls(ranks, microbatches, chunks, group),
        "groups that do not stall the pipeline",
        f"pass group={microbatches}, or one that leaves no small last group",
    )
    return group


def _stalls(ranks: int, microbatches: int, chunks: int, group: int) -> bool:
    """Tell whether two groups in a row are too small to bridge the way to the last rank and back.

    The backward of a group on the first rank waits for forwards of the next group that are
    ``2(p - 1)`` further on in 1F1B; these must not need the very backward that waits.
    """
    bridge = 2 * (ranks - 1)
    groups, last = -(-microbatches // group), (microbatches - 1) % group + 1
    inner = groups > 2 and 2 * group < bridge
    return chunks > 1 and (inner or (groups > 1 and group + last < bridge and (chunks > 2 or last > 1)))


# -- slices of sequences: every stage hands a carry from a slice to the next
#
# The forwards of a sequence go from its first slice to its last, and its backwards from the last to the
# first, so that the first backward waits for all slices of its sequence: a warm-up is longer by k - 1 slices
# than without. A slice costs a k-th of a sequence, and so do a bubble and an activation.


@naming_arguments
def seq1f1b(ranks: int, sequences: int, slices: int = 2, chunks: int = 1) -> Schedule:
    """Run slices as 1F1B runs microbatches, backwards from the last slice of a sequence; or interleaved.

    Bubble time ``(p - 1)(F + B)`` of a slice; of the makespan ``(p - 1) / (n k + p - 1)``; at most
    ``min(p - r + k - 1, n k)`` live activations of slices on rank r. With v stages per rank the warm-up is
    that of interleaved 1F1B and ``k - 1`` forwards.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(seq1f1b(ranks=2, sequences=2, slices=2)), end="")
    rank 0  0F0 0F1 0F2  .  0B1 0F3 0B0  .  0B3 0B2
    rank 1   .  1F0 1F1 1B1 1F2 1B0 1F3 1B3 1B2  .

    Args:
        ranks: number of ranks p.
        sequences: number of sequences n; microbatch m is slice ``m % k`` of sequence ``m // k``.
        slices: number of slices k of a sequence.
        chunks: stages per rank v; rank r holds stages r, r + p, ...

    Raises:
        ValueError: an argument is below 1.

    References:
        Sun et al., Seq1F1B (arXiv:2406.03488), section 3; Li et al., TeraPipe, ICML 2021 (arXiv:2102.07988),
        for the forwards.
    """
    size, forwards, backwards = _orders(ranks, sequences, slices, chunks)

    def program_of(r: int) -> Iterator[Instruction]:
        warm_up = (1 + (chunks > 1)) * (ranks - 1 - r) + (chunks - 1) * size + slices - 1
        mine = [F(chunk * ranks + r, m) for chunk, m in forwards]
        return alternate(mine, [[B(chunk * ranks + r, m)] for chunk, m in backwards], warm_up)

    return rank_by_rank("seq1f1b", loop(ranks, chunks), ranks, sequences * slices, program_of, slices)


@naming_arguments
def seq_zb(ranks: int, sequences: int, slices: int = 2, chunks: int = 1) -> Schedule:
    """Run slices as ZB-H1 runs microbatches, input gradients from the last slice; or as interleaved ZB does.

    Bubble time ``(p - 1)(F + I - W)/v`` of a slice where ``n k >= p + k - 1`` and W <= I; weight gradients
    of rank r follow r input gradients late.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(seq_zb(ranks=2, sequences=2, slices=2)), end="")
    rank 0  0F0 0F1 0F2  .  0I1 0W1 0F3 0I0 0W0 0I3 0W3 0I2 0W2
    rank 1   .  1F0 1F1 1I1 1F2 1I0 1W1 1F3 1I3 1W0 1I2 1W3 1W2

    Args:
        ranks: number of ranks p.
        sequences: number of sequences n; microbatch m is slice ``m % k`` of sequence ``m // k``.
        slices: number of slices k of a sequence.
        chunks: stages per rank v; rank r holds stages r, r + p, ...

    Raises:
        ValueError: an argument is below 1.

    References:
        Sun et al., Seq1F1B (arXiv:2406.03488), section 3; Qi et al., Zero Bubble Pipeline Parallelism, ICLR
        2024 (arXiv:2401.10241), section 2.
    """
    size, forwards, backwards = _orders(ranks, sequences, slices, chunks)

    def program_of(r: int) -> Iterator[Instruction]:
        warm_up = ranks - 1 - r + (chunks - 1) * size + slices - 1
        mine = [F(chunk * ranks + r, m) for chunk, m in forwards]
        return delayed_weights(mine, [(chunk * ranks + r, m) for chunk, m in backwards], warm_up, delay=r)

    return rank_by_rank("seq_zb", loop(ranks, chunks), ranks, sequences * slices, program_of, slices)


@naming_arguments
def decode(ranks: int, sequences: int, slices: int = 2) -> Schedule:
    """Run the first slices of all sequences, then the second slices, and no backward: a slice is a token.

    What the last stage returns for a slice goes back to stage 0 for the next slice of the sequence, as
    :func:`~ppfunc.with_skips` tells: a model generates many sequences from its own output. Bubble time
    ``(p - 1)F`` where there are at least as many sequences as ranks: no rank waits for a token.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(decode(ranks=2, sequences=3, slices=2)), end="")
    rank 0  0F0 0F2 0F4 0F1 0F3 0F5  .
    rank 1   .  1F0 1F2 1F4 1F1 1F3 1F5

    Args:
        ranks: number of ranks p, one stage each, from 2: a single stage hands itself what it returns.
        sequences: number of sequences n; microbatch m is slice ``m % k`` of sequence ``m // k``.
        slices: number of slices k of a sequence.

    Raises:
        ValueError: an argument is below 1, or ``ranks`` below 2.
    """
    require_counts(2, ranks=ranks)
    require_counts(sequences=sequences, slices=slices)
    order = [n * slices + j for j in range(slices) for n in range(sequences)]
    made = rank_by_rank("decode", loop(ranks), ranks, len(order), lambda r: (F(r, m) for m in order), slices)
    return replace(made, skips=((ranks - 1, 0),))


_Places = list[tuple[int, int]]  # chunk and microbatch, in order


def _orders(ranks: int, sequences: int, slices: int, chunks: int) -> tuple[int, _Places, _Places]:
    """Return the size of a group in slices, and the orders of all forwards and of all backwards of a rank."""
    require_counts(ranks=ranks, sequences=sequences, slices=slices, chunks=chunks)
    size = group_size(ranks, sequences * slices, chunks, slices=slices)
    order = walk(sequences, chunks, size // slices)
    forwards = [(chunk, n * slices + j) for chunk, n in order for j in range(slices)]
    backwards = [(chunks - 1 - chunk, n * slices + j) for chunk, n in order for j in reversed(range(slices))]
    return size, forwards, backwards


# -- two chunks per rank in a V, from a pattern that repeats: ZB-V, V-Half, V-Min


@naming_arguments
def zbv(ranks: int, microbatches: int) -> Schedule:
    """Run stages r and 2p - 1 - r on rank r in a fixed pattern that has no gap at equal costs.

    No bubble in the span where F = I = W and ``m >= 2p - 1``, ``(p - 1)F`` per chunk of the
    makespan; at most ``2p`` chunk activations wait for their W.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(zbv(ranks=2, microbatches=3)), end="")
    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2  .
    rank 1   .  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    Args:
        ranks: number of ranks p, two stages each.
        microbatches: number of microbatches m; below ``2p - 1`` the pattern of ``2p - 1`` with
            the surplus left out.

    Raises:
        ValueError: an argument is below 1.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv:2401.10241), section 6.
    """

    def program_of(r: int) -> Iterator[Instruction]:
        letters = _pattern(r, ranks, max(2 * ranks - 1, microbatches))
        stages = {letter: r if letter.isupper() else 2 * ranks - 1 - r for letter in letters}
        left = {
            letter: map(partial(Instruction, Op(letter.upper()), stage), range(microbatches))
            for letter, stage in stages.items()
        }
        yield from filter(None, (next(left[letter], None) for letter in letters))  # without the surplus

    return rank_by_rank("zbv", v_shape(ranks), ranks, microbatches, program_of)


def _pattern(rank: int, ranks: int, microbatches: int) -> str:
    """Write the letters of the pattern: capitals for the first chunk, small ones for the second."""
    warm_up = "F" * (2 * (ranks - rank) - 1) + "fF" * rank + "fiw" * (ranks - rank)
    steady = "FIWfiw" * (microbatches - 2 * ranks + rank + 1) + "IWfiw" * (ranks - rank - 1)
    cool_down = "Ii" * rank + "IW" * (ranks - rank) + "w" * rank + "W" * rank
    return warm_up + steady + cool_down


@naming_arguments
def v_half(ranks: int, microbatches: int) -> Schedule:
    """Run stages r and 2p - 1 - r on rank r in a pattern that keeps activations short-lived.

    Where F = I = W = 1 per chunk and ``m > p``, the bubble time is ``3p - 7`` for p even,
    ``3p - 4`` for p odd (1 for two ranks, 0 for one), below half of 1F1B's ``6(p - 1)``; at most
    ``2((p + 2) // 2)`` chunk activations wait for their W, half as many as full ones.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(v_half(ranks=3, microbatches=3)), end="")
    rank 0  0F0 0F1 0F2  .   .  5F0 5I0 5W0 5F1 5I1 5W1  .  0I0 0W0  .  5F2 5I2 0I1 5W2 0W1  .  0I2 0W2
    rank 1   .  1F0 1F1  .  4F0  .  4F1 4I0 4W0 1F2 4I1 1I0 1W0 4W1 4F2  .  1I1 4I2 1W1 4W2 1I2 1W2  .
    rank 2   .   .  2F0 3F0 2F1 3F1  .   .  3I0 3W0 2I0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2  .

    Args:
        ranks: number of ranks p, two stages each.
        microbatches: number of microbatches m.

    Raises:
        ValueError: an argument is below 1.

    References:
        Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (arXiv:2405.15362), section 3.
    """

    placement, p, shift = v_shape(ranks), ranks, 0 if ranks % 2 else 3
    slots = [(2 * r, 3 * p - r - 2, 3 * p + shift + 2 * r - 1, 6 * p + shift - r - 2) for r in range(ranks)]
    return from_pattern("v_half", placement, microbatches, slots)


@naming_arguments
def v_min(ranks: int, microbatches: int) -> Schedule:
    """Run stages r and 2p - 1 - r on rank r, each microbatch through the V without a stop.

    Where F = I = W = 1 per chunk and ``m > p``, the bubble time is ``4p - 7``, ``4p - 5`` or
    ``4p - 6`` for p of remainder 0, 1 or 2 by 3 (0 for one rank), two thirds of 1F1B's
    ``6(p - 1)``; at most ``2((p + 4) // 3)`` chunk activations wait for their W. Unequal costs
    cost more here than in any other schedule.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(v_min(ranks=3, microbatches=3)), end="")
    rank 0  0F0 0F1 0F2  .   .  5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0  .   .  5F2 5I2 0I1 0W1 5W2  .  0I2 0W2
    rank 1   .  1F0 1F1  .  4F0  .  4F1 4I0 4W0 1F2 1I0 1W0 4I1 4W1 4F2  .  1I1 4I2 1W1 4W2 1I2 1W2  .
    rank 2   .   .  2F0 3F0 2F1 3F1  .   .  3I0 2I0 3W0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2  .

    Args:
        ranks: number of ranks p, two stages each.
        microbatches: number of microbatches m.

    Raises:
        ValueError: an argument is below 1.

    References:
        Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (arXiv:2405.15362), section 3.
    """

    placement, p, shift = v_shape(ranks), ranks, 0 if ranks % 3 else 2
    slots = [(r, 2 * p - r - 1, 2 * p + shift + r, 4 * p + shift - r - 1) for r in range(ranks)]
    return from_pattern("v_min", placement, microbatches, slots)


PERIOD = 6  # slots of a microbatch on a rank: forward, input and weight gradient of two chunks
SlotNumbers = dict[Instruction, int]
Slots = tuple[int, int, int, int]


def from_pattern(name: str, placement: Placement, microbatches: int, slots: Sequence[Slots]) -> Schedule:
    """Repeat slots every six slots, each instruction as early as memory allows.

    Args:
        slots: slots of microbatch 0 on each rank: forward of the first and of the second chunk, input
            gradient of the second and of the first.
    """
    require_counts(microbatches=microbatches)
    pattern = [_repeat(r, len(placement) - 1 - r, microbatches, mine) for r, mine in enumerate(slots)]
    programs = _drain(_squeeze(pattern, placement), pattern, len(placement))
    return single_chain(name, placement, microbatches, programs)


def _repeat(first: int, second: int, microbatches: int, slots: Slots) -> SlotNumbers:
    """Place the slots of a rank unmoved; weight gradients take free slots, first in first out."""
    times = {
        op(s, m): slot + PERIOD * m
        for op, s, slot in zip((F, F, I, I), (first, second, second, first), slots, strict=True)
        for m in range(microbatches)
    }
    taken = {time: i for i, time in times.items()}
    waiting: deque[Instruction] = deque()
    for time in range(max(taken) + len(taken)):
        i = taken.get(time)
        if i and i.op is Op.I:
            waiting.append(i._replace(op=Op.W))
        elif not i and waiting:
            times[waiting.popleft()] = time
    return times


def _needs(i: Instruction, stages: int) -> Iterator[Instruction]:
    """List the instructions whose results this one consumes."""
    if i.op is Op.W:
        yield i._replace(op=Op.I)
        return
    if i.op is Op.I:
        yield i._replace(op=Op.F)
    beyond = i.stage - 1 if i.op is Op.F else i.stage + 1
    if 0 <= beyond < stages:
        yield i._replace(stage=beyond)


def _squeeze(pattern: list[SlotNumbers], placement: tuple[int, ...]) -> SlotNumbers:
    """Move every instruction to its earliest free slot, in the order of the pattern.

    Inputs come before uses, and activations stay within the peak of the pattern.
    """
    # The most activations of a rank that wait for their weight gradient at one time.
    orders = (sorted(times, key=times.__getitem__) for times in pattern)
    peak = max(n for order in orders for n in accumulate((i.op is Op.F) - (i.op is Op.W) for i in order))
    busy: list[set[int]] = [set() for _ in pattern]
    # Activations in each slot so far; after the last, as many as are held.
    live: list[list[int]] = [[] for _ in pattern]
    held = [0] * len(pattern)
    moved: SlotNumbers = {}
    for i, time in sorted((item for times in pattern for item in times.items()), key=itemgetter(1)):
        rank = placement[i.stage]
        ready = max((moved[n] + 1 for n in _needs(i, len(placement))), default=0)
        known = live[rank]
        if i.op is Op.F and time > len(known) and held[rank] >= peak:
            ready = time
        elif i.op is Op.F:
            ready = next(
                (s + 1 for s in range(min(time, len(known)) - 1, ready - 1, -1) if known[s] >= peak), ready
            )
        slot = moved[i] = next(s for s in range(ready, time + 1) if s not in busy[rank])
        busy[rank].add(slot)
        known += [held[rank]] * (slot + 1 - len(known))
        change = (i.op is Op.F) - (i.op is Op.W)
        held[rank] += change
        for s in range(slot + (i.op is Op.W), len(known)):
            known[s] += change
    return moved


def _drain(squeezed: SlotNumbers, pattern: list[SlotNumbers], stages: int) -> list[list[Instruction]]:
    """Delay the weight gradients after a rank's last forward until no input gradient is ready."""
    orders = [sorted(times, key=squeezed.__getitem__) for times in pattern]
    ends = [max(k for k, i in enumerate(order) if i.op is Op.F) + 1 for order in orders]
    programs = [order[:end] for order, end in zip(orders, ends, strict=True)]
    queues = [_queues(order[end:], rank) for rank, (order, end) in enumerate(zip(orders, ends, strict=True))]
    done = {i: squeezed[i] for program in programs for i in program}
    free = [squeezed[program[-1]] + 1 for program in programs]
    time = min(free)
    while any(map(any, queues)):
        for rank, program in enumerate(programs):
            for queue in queues[rank] if free[rank] <= time else ():
                if queue and all(done.get(n, time) < time for n in _needs(queue[0], stages)):
                    done[queue[0]] = time
                    program.append(queue.popleft())
                    break
        time += 1
    return programs


def _queues(tail: list[Instruction], first: int) -> list[deque[Instruction]]:
    """Return the input gradients of a rank's second and of its first stage, and its weight gradients."""
    late, early = ([i for i in tail if i.op is Op.I and (i.stage == first) == own] for own in (True, False))
    return [deque(early), deque(late), deque(i for i in tail if i.op is Op.W)]


# -- two streams of microbatches in opposite directions: DualPipe, DualPipeV, Chimera


@naming_arguments
def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """Run two chains over the same ranks, entering at both ends, with overlapped forward and backward.

    Stages 0..p-1 go up the ranks and walk the first half of the microbatches; stages p..2p-1,
    stage p + k a replica of stage k, go down and walk the second half. With F&B the time of an
    overlapped pair, the bubble time is ``(p/2 - 1)(F&B + B - 3W)`` where F = I and W <= F, with
    ``p + 1`` live activations; every rank holds the parameters of two stages.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(dualpipe(ranks=4, microbatches=8)).replace("rank ", ""), end="")
    0  0F0 0F1 0F2 7F4 7I4 7W4 7F5 0F3;7B5----  .  7F6;0B0---- 7B6----  .  7F7;0B1---- 7B7---- 0I2 0W2 0I3 0W3
    1   .  1F0 6F4 1F1 6F5 1F2 6B4---- 6F6;1B0---- 1F3;6B5---- 6F7;1B1---- 6B6---- 1B2----  .  6I7 1I3 6W7 1W3
    2   .  5F4 2F0 5F5 2F1 5F6 2B0---- 2F2;5B4---- 5F7;2B1---- 2F3;5B5---- 2B2---- 5B6----  .  2I3 5I7 2W3 5W7
    3  4F4 4F5 4F6 3F0 3I0 3W0 3F1 4F7;3B1----  .  3F2;4B4---- 3B2----  .  3F3;4B5---- 3B3---- 4I6 4W6 4I7 4W7

    Args:
        ranks: number of ranks p, even.
        microbatches: number of microbatches of both directions together, even, at least 2p.

    Raises:
        ValueError: p or m odd, or m below 2p.

    References:
        DeepSeek-AI, DeepSeek-V3 Technical Report (arXiv:2412.19437), section 3.2.1;
        deepseek-ai/DualPipe, ``dualpipe.py``.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    expected = f"an even number of at least 2 * ranks = {2 * ranks}"
    chains = _both_ways(ranks, microbatches, 2 * ranks, expected, "dualpipev")
    programs = []
    for r in range(ranks):
        up, down = stream(r, chains[0].microbatches), stream(2 * ranks - 1 - r, chains[1].microbatches)
        entering, leaving = (up, down) if r < ranks // 2 else (down, up)
        phases = eight_phases(entering, leaving, ranks // 2, min(r, ranks - 1 - r), microbatches // 2)
        programs.append(tuple((i,) for i in phases))
    return Schedule("dualpipe", v_shape(ranks), chains, tuple(programs), replicas=by_place(chains))


@naming_arguments
def dualpipev(ranks: int, microbatches: int) -> Schedule:
    """Run stages r and 2p - 1 - r on rank r; forwards of each overlap with backwards of its partner.

    With F&B the time of an overlapped pair of chunks, the bubble time is
    ``(p - 1)(F&B + B - 3W)`` where F = I and W <= F, with ``2p + 1`` live chunk activations.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(dualpipev(ranks=2, microbatches=4)).replace("rank ", ""), end="")
    0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3;3B1----  .  3F2;0B0---- 3B2----  .  3F3;0B1---- 3B3---- 0I2 0W2 0I3 0W3
    1   .  1F0 2F0 1F1 2F1 1F2 2B0---- 2F2;1B0---- 1F3;2B1---- 2F3;1B1---- 2B2---- 1B2----  .  2I3 1I3 2W3 1W3

    Args:
        ranks: number of ranks p, two stages each.
        microbatches: number of microbatches, at least 2p.

    Raises:
        ValueError: an argument below 1, or fewer than 2p microbatches.

    References:
        deepseek-ai/DualPipe, ``dualpipev.py``; Sea AI Lab, "Cut-in-half", 2025.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    require(
        "microbatches",
        microbatches,
        microbatches >= 2 * ranks,
        f"at least 2 * ranks = {2 * ranks}",
        "split the batch finer",
    )

    def program_of(r: int) -> Iterator[Instruction]:
        up, down = (stream(stage, range(microbatches)) for stage in (r, 2 * ranks - 1 - r))
        return eight_phases(up, down, ranks, r, microbatches)

    return rank_by_rank("dualpipev", v_shape(ranks), ranks, microbatches, program_of)


@naming_arguments
def chimera(ranks: int, microbatches: int) -> Schedule:
    """Run two chains in opposite directions over the same ranks, p / 2 microbatches of each at a time.

    Stages 0..p-1 go up the ranks and walk the first half of the microbatches; stages p..2p-1,
    stage p + k a replica of stage k, go down and walk the second half. Where F = B and m is a
    multiple of p, the bubble is ``(p - 2)/(2m + p - 2)`` of the makespan; at most p live
    activations; every rank holds the parameters of two stages.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(chimera(ranks=4, microbatches=4)), end="")
    rank 0  0F0 0F1  .  7F2 7B2 7F3 7B3 0B0  .  0B1
    rank 1   .  1F0 6F2 1F1 6F3 6B2 1B0 6B3 1B1  .
    rank 2   .  5F2 2F0 5F3 2F1 2B0 5B2 2B1 5B3  .
    rank 3  4F2 4F3  .  3F0 3B0 3F1 3B1 4B2  .  4B3

    Args:
        ranks: number of ranks p, even.
        microbatches: number of microbatches m of both directions together, even.

    Raises:
        ValueError: an argument below 1, or p or m odd.

    References:
        Li and Hoefler, Chimera, SC 2021 (arXiv:2107.06925), sections 3.1 and 3.5.
    """
    chains = _both_ways(ranks, microbatches, 2, "an even number", "1f1b")
    programs = []
    for r in range(ranks):
        slots = {}
        for chain, place in zip(chains, (r, ranks - 1 - r), strict=True):
            for k, m in enumerate(chain.microbatches):
                start = 2 * ranks * (k // (ranks // 2)) + 2 * (k % (ranks // 2))
                slots[start + place] = F(chain.stages[place], m)
                slots[start + 2 * ranks - 1 - place] = B(chain.stages[place], m)
        programs.append(tuple((slots[time],) for time in sorted(slots)))
    return Schedule("chimera", v_shape(ranks), chains, tuple(programs), replicas=by_place(chains))


def _both_ways(ranks: int, microbatches: int, least: int, expected: str, other: str) -> tuple[Flow, Flow]:
    """Make a chain up the ranks and one down, each for half of the microbatches.

    Raises:
        ValueError: an odd number, or fewer than ``least`` microbatches, where ``expected`` says what is
            right. ``other`` is a builder for odd numbers of ranks.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    require("ranks", ranks, ranks % 2 == 0, "an even number", f"use an even number, or {other}")
    require(
        "microbatches",
        microbatches,
        microbatches % 2 == 0 and microbatches >= least,
        expected,
        "split the batch finer",
    )
    half = microbatches // 2
    up = Flow(tuple(range(ranks)), range(half))
    return up, Flow(tuple(range(ranks, 2 * ranks)), range(half, microbatches))


class MicrobatchStream(NamedTuple):
    """The work that one stage still has to do: its forwards and its backwards, each in order."""

    forwards: Iterator[Instruction]
    backwards: Iterator[Instruction]


def stream(stage: int, microbatches: Sequence[int]) -> MicrobatchStream:
    """Make the stream of a stage's work on its microbatches, with nothing done yet."""
    return MicrobatchStream((F(stage, m) for m in microbatches), (B(stage, m) for m in microbatches))


def eight_phases(
    a: MicrobatchStream, b: MicrobatchStream, width: int, place: int, microbatches: int
) -> Iterator[Instruction]:
    """Yield the eight phases of the rank that is ``place`` ranks from the end where stream a enters.

    Args:
        a: the stream that starts here early and ends late (phase 0 in the original).
        b: the other stream (phase 1).
        width: ranks that a microbatch passes before it meets the other stream.
        place: distance of the rank from the entry, ``0 <= place < width``.
        microbatches: number of microbatches of each stream, at least ``2 * width``.
    """
    before = width - place - 1
    waiting: deque[Instruction] = deque()  # weight gradients put off, first in, first out

    def zero_bubble(x: MicrobatchStream) -> Instruction:
        whole = next(x.backwards)
        waiting.append(whole._replace(op=Op.W))
        return whole._replace(op=Op.I)

    def pair(x: MicrobatchStream, y: MicrobatchStream) -> Instruction:
        return overlap(next(x.forwards), next(y.backwards))

    for _ in range(2 * before):  # 1: forwards of a
        yield next(a.forwards)
    for _ in range(place + 1):  # 2: forwards of both
        yield from (next(a.forwards), next(b.forwards))
    for _ in range(before):  # 3: zero-bubble backward, its weights, forward of b
        yield from (zero_bubble(b), waiting.popleft(), next(b.forwards))
    for turn in range(microbatches - 2 * width + place + 1):  # 4: the steady state, overlapped
        if turn == 0 and before == 0:  # where the streams meet, overlapping the first pair would add a bubble
            yield from (next(a.forwards), next(b.backwards))
        else:
            yield pair(a, b)
        yield pair(b, a)
    for _ in range(before):  # 5: the forwards of b run out
        yield from (next(b.backwards), pair(b, a))
    for turn in range(2 * (place + 1)):  # 6: backwards of both, zero-bubble in the second half
        x = (b, a)[turn % 2]
        yield zero_bubble(x) if turn > place else next(x.backwards)
    for _ in range(before):  # 7: weights, zero-bubble backward of a
        yield from (waiting.popleft(), zero_bubble(a))
    yield from waiting  # 8: the weights that are left


# -- the instruction streams of DeepSpeed: training, inference, data parallelism


@naming_arguments
def deepspeed_train(ranks: int, microbatches: int, order: str = "source") -> Schedule:
    """Run 1F1B in ``2(m + p - 1)`` steps, forward where step and stage are both even or both odd.

    The two orders of messages inside a step each go with their own number of buffers:
    ``source`` receives an activation before it sends a gradient and sends an activation before
    it receives a gradient, with ``max(2, min(p - r + 1, m))`` buffers on rank r; ``head`` has
    both the other way round, and ``max(2, min(p - r, m))``. Bubble ``(p - 1)/(m + p - 1)``.

    >>> for program in deepspeed_train(ranks=2, microbatches=1).programs:
    ...     print(" | ".join(" ".join(map(str, step)) or "-" for step in program))
    0LOAD0@0 0F0@0 | 0SEND_F0@0 | - | 0RECV_B0@0 0B0@0 0REDUCE_TIED 0REDUCE_GRAD 0STEP
    - | 1RECV_F0@0 1LOAD0@0 1F0@0 | 1B0@0 | 1SEND_B0@0 1REDUCE_TIED 1REDUCE_GRAD 1STEP

    Args:
        ranks: number of ranks p, one stage each.
        microbatches: number of microbatches m.
        order: ``"source"`` or ``"head"``.

    Raises:
        ValueError: a count below 1, or another order.

    References:
        DeepSpeed, ``runtime/pipe/schedule.py``, TrainSchedule, before and after pull request 2862.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    require("order", order, order in ("source", "head"), "'source' or 'head'", "name one of the two orders")
    programs = tuple(tuple(_training_steps(r, ranks, microbatches, order == "head")) for r in range(ranks))
    return Schedule(
        "deepspeed_train", loop(ranks), (Flow(tuple(range(ranks)), range(microbatches)),), programs
    )


def _training_steps(stage: int, stages: int, microbatches: int, head: bool) -> Iterator[Step]:
    buffers = max(2, min(stages - stage + (not head), microbatches))
    last = 2 * (microbatches + stages - 1) - 1
    before = -1
    for step in range(last + 1):
        forward = (step - stage) % 2 == 0
        now = (step - stage) // 2 if forward else (step + stage + 1) // 2 - stages
        linked = stage > 0 if forward else stage < stages - 1
        give, take = (Op.SEND_B, Op.RECV_F) if forward else (Op.SEND_F, Op.RECV_B)
        messages = [(give, before, linked), (take, now, linked)]
        compute = [
            (Op.LOAD, now, forward and stage in (0, stages - 1)),
            (Op.F if forward else Op.B, now, True),
        ]
        wanted = (messages if forward == head else messages[::-1]) + compute
        numbered = (
            Instruction(op, stage, m, slot=m % buffers)
            for op, m, holds in wanted
            if holds and 0 <= m < microbatches
        )
        yield (*numbered, *(Instruction(op, stage) for op in TAIL if step == last))
        before = now


@naming_arguments
def deepspeed_inference(ranks: int, microbatches: int) -> Schedule:
    """Run the forward of microbatch ``step - r`` on rank r, in ``m + p - 1`` steps and two buffers.

    Even ranks send before they receive, odd ranks after; the first and the last rank load
    their part of the microbatch before the messages. Bubble time ``(p - 1)F``.

    >>> for program in deepspeed_inference(ranks=2, microbatches=2).programs:
    ...     print(" | ".join(" ".join(map(str, step)) or "-" for step in program))
    0LOAD0@0 0F0@0 | 0LOAD1@1 0SEND_F0@0 0F1@1 | 0SEND_F1@1
    - | 1LOAD0@0 1RECV_F0@0 1F0@0 | 1LOAD1@1 1RECV_F1@1 1F1@1

    Args:
        ranks: number of ranks p, one stage each.
        microbatches: number of microbatches m.

    Raises:
        ValueError: an argument is below 1.

    References:
        DeepSpeed, ``runtime/pipe/schedule.py``, InferenceSchedule.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    programs = tuple(tuple(_inference_steps(r, ranks, microbatches)) for r in range(ranks))
    return Schedule(
        "deepspeed_inference", loop(ranks), (Flow(tuple(range(ranks)), range(microbatches)),), programs
    )


def _inference_steps(stage: int, stages: int, microbatches: int) -> Iterator[Step]:
    for step in range(microbatches + stages - 1):
        now = step - stage
        into = (step + stage % 2) % 2
        send = (Op.SEND_F, now - 1, 1 - into, stage < stages - 1)
        receive = (Op.RECV_F, now, into, stage > 0)
        load = (Op.LOAD, now, into, stage in (0, stages - 1))
        wanted = (load, *((receive, send) if stage % 2 else (send, receive)), (Op.F, now, into, True))
        yield tuple(
            Instruction(op, stage, m, slot=slot)
            for op, m, slot, holds in wanted
            if holds and 0 <= m < microbatches
        )


@naming_arguments
def data_parallel(ranks: int, microbatches: int) -> Schedule:
    """Run load, forward and backward of one microbatch after another, each rank on its own share.

    Every rank is a chain of one stage: rank r holds the replica r of the model and works through
    ``m`` microbatches of its own, numbered from ``r * m``. The last step sums the gradients and
    updates. No bubble; one live activation; one buffer.

    >>> for program in data_parallel(ranks=2, microbatches=2).programs:
    ...     print(" | ".join(" ".join(map(str, step)) for step in program))
    0LOAD0@0 0F0@0 0B0@0 | 0LOAD1@0 0F1@0 0B1@0 0REDUCE_GRAD 0STEP
    1LOAD2@0 1F2@0 1B2@0 | 1LOAD3@0 1F3@0 1B3@0 1REDUCE_GRAD 1STEP

    Args:
        ranks: number of ranks.
        microbatches: number of microbatches m of each rank.

    Raises:
        ValueError: an argument is below 1.

    References:
        DeepSpeed, ``runtime/pipe/schedule.py``, DataParallelSchedule.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    chains = tuple(Flow((r,), range(r * microbatches, (r + 1) * microbatches)) for r in range(ranks))
    programs = tuple(
        tuple(
            (
                *(Instruction(op, r, m, slot=0) for op in (Op.LOAD, Op.F, Op.B)),
                *(Instruction(op, r) for op in (Op.REDUCE_GRAD, Op.STEP) if m == chain.microbatches[-1]),
            )
            for m in chain.microbatches
        )
        for r, chain in enumerate(chains)
    )
    return Schedule("data_parallel", tuple(range(ranks)), chains, programs, replicas=by_place(chains))
