"""Build schedules of several chunks per rank, dealt round the ranks: interleaved and breadth first."""

from collections.abc import Iterator

from ppfunc._checks import naming_arguments, require_counts
from ppfunc.parallel.placement import loop

from ..instruction import B, F, Instruction
from ..schedule import Schedule
from .one_stage import alternate, delayed_weights, rank_by_rank, require


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


def walk(microbatches: int, chunks: int, group: int) -> list[tuple[int, int]]:
    """List ``(chunk, microbatch)`` of the k-th forward of every rank; the last group may be smaller.

    >>> walk(microbatches=3, chunks=2, group=2)
    [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]
    """
    firsts = range(0, microbatches, group)
    return [(c, m) for g in firsts for c in range(chunks) for m in range(g, min(g + group, microbatches))]


def group_size(ranks: int, microbatches: int, chunks: int, group: int | None = None) -> int:
    """Return the number of microbatches that a rank runs through one chunk before it takes the next.

    Where ``group`` is None: an even division in ``max(1, m // p)`` groups where there is one,
    else the smallest size from p upwards that does not stall.

    Raises:
        ValueError: a size below 1, or one with which ranks would wait for each other for ever.
    """
    groups = max(1, microbatches // ranks)
    if group is None and microbatches % groups == 0:
        return microbatches // groups
    if group is None:
        return next(n for n in range(ranks, microbatches + 1) if not _stalls(ranks, microbatches, chunks, n))
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
