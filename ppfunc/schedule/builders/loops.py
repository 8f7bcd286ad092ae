"""Build schedules of stages dealt round the ranks, one each or several: GPipe, 1F1B, ZB-H1, ZB-H2, inference,
interleaved and breadth first; and of slices of sequences.

Their orders, and the form of a schedule of one chain, serve other builders as well.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from ppfunc._checks import naming_arguments, require_counts
from ppfunc.parallel.topology import Placement, loop

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
) -> Schedule:
    """Make the schedule of one chain in which rank r runs ``program_of(r)``."""
    require_counts(microbatches=microbatches)
    return single_chain(name, placement, microbatches, map(program_of, range(ranks)))


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
    moves = not _stalls(ranks, microbatches, chunks, group)
    mend = f"pass group={microbatches}, or one that leaves no small last group"
    require("group", group, moves, "groups that do not stall the pipeline", mend)
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

    programs = map(program_of, range(ranks))
    return single_chain("seq1f1b", loop(ranks, chunks), sequences * slices, programs, slices=slices)


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

    programs = map(program_of, range(ranks))
    return single_chain("seq_zb", loop(ranks, chunks), sequences * slices, programs, slices=slices)


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
    programs = ([F(rank, m) for m in order] for rank in range(ranks))
    made = single_chain("decode", loop(ranks), sequences * slices, programs, slices=slices)
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
