"""Place stages on ranks: a placement is a tuple of ranks, one entry per stage."""

from collections.abc import Iterable, Sequence

from ppfunc._checks import require_counts, require_one_of

Placement = tuple[int, ...]
"""``placement[stage]`` is the rank that holds the stage."""


def loop(ranks: int, chunks: int = 1) -> Placement:
    """Deal stages round the ranks, ``chunks`` times: stage ``s`` is on rank ``s % ranks``.

    >>> loop(3, chunks=2)
    (0, 1, 2, 0, 1, 2)
    """
    require_counts(ranks=ranks, chunks=chunks)
    return tuple(range(ranks)) * chunks


def v_shape(ranks: int, chunks: int = 2) -> Placement:
    """Let stages go up the ranks, down, up again, ``chunks`` times: the two stages at a turn share a rank.

    >>> v_shape(3), v_shape(2, chunks=3)
    ((0, 1, 2, 2, 1, 0), (0, 1, 1, 0, 0, 1))
    """
    require_counts(ranks=ranks, chunks=chunks)
    up = tuple(range(ranks))
    return tuple(rank for chunk in range(chunks) for rank in (up[::-1] if chunk % 2 else up))


def explicit(ranks_of_stages: Iterable[int]) -> Placement:
    """Make the placement with these ranks: that of stage 0, of stage 1, and so on.

    Raises:
        ValueError: the placement is empty, or a rank between 0 and the largest holds no stage.

    >>> explicit([0, 1, 1, 0])
    (0, 1, 1, 0)
    """
    placement = tuple(ranks_of_stages)
    wrong = [r for r in placement if isinstance(r, bool) or not isinstance(r, int) or r < 0]
    if wrong or not placement:
        raise ValueError(
            f"a placement is the rank, 0 or more, of each of one or more stages; got {placement}"
        )
    idle = sorted(set(range(max(placement))) - set(placement))
    if idle:
        raise ValueError(
            f"ranks {idle} hold no stage in {placement}: number the ranks 0..{len(set(placement)) - 1}"
            " without gaps"
        )
    return placement


def place(style: str, ranks: int, stages: int) -> Placement:
    """Place ``stages`` stages on ``ranks`` ranks in a style.

    Args:
        style: ``"loop"`` or ``"v"``.
        ranks: number of ranks.
        stages: number of stages, a multiple of ``ranks``.

    Raises:
        ValueError: an unknown style, or stages that do not spread evenly over the ranks.

    >>> place("v", ranks=4, stages=8)
    (0, 1, 2, 3, 3, 2, 1, 0)
    """
    styles = {"loop": loop, "v": v_shape}
    require_one_of("style", style, list(styles))
    require_counts(ranks=ranks, stages=stages)
    if stages % ranks:
        raise ValueError(
            f"{stages} stages do not spread evenly over {ranks} ranks: use a multiple of {ranks}"
        )
    return styles[style](ranks, stages // ranks)


def stages_of(placement: Sequence[int], rank: int) -> tuple[int, ...]:
    """List the stages that ``rank`` holds, ascending; none for a rank that holds none.

    >>> stages_of(loop(4, 2), 1), stages_of(v_shape(4), 1)
    ((1, 5), (1, 6))
    """
    return tuple(stage for stage, holder in enumerate(placement) if holder == rank)
