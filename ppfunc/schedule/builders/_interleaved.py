"""The order in which interleaved schedules walk chunks: groups of microbatches, chunk by chunk."""

from __future__ import annotations

from ._parts import require, require_counts


def walk(microbatches: int, chunks: int, group: int) -> list[tuple[int, int]]:
    """``(chunk, microbatch)`` of the k-th forward of every rank; the last group may be smaller.

    >>> walk(microbatches=3, chunks=2, group=2)
    [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]
    """
    firsts = range(0, microbatches, group)
    return [(c, m) for g in firsts for c in range(chunks) for m in range(g, min(g + group, microbatches))]


def group_size(ranks: int, microbatches: int, chunks: int, group: int | None = None) -> int:
    """The number of microbatches that a rank runs through one chunk before it takes the next.

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
    """Whether two groups in a row are too small to bridge the way to the last rank and back.

    The backward of a group on the first rank waits for forwards of the next group that are
    ``2(p - 1)`` further on in 1F1B; these must not need the very backward that waits.
    """
    bridge = 2 * (ranks - 1)
    groups, last = -(-microbatches // group), (microbatches - 1) % group + 1
    inner = groups > 2 and 2 * group < bridge
    return chunks > 1 and (inner or (groups > 1 and group + last < bridge and (chunks > 2 or last > 1)))
