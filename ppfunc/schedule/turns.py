"""Choose which of the ranks that can go on runs next, so that what it touches is still in the caches."""

from collections.abc import Callable, Sequence, Sized

_WINDOW = 32  # steps by which a rank may be ahead: what some 32 ranks touch meanwhile fits into the caches


def take_turns(resume: Callable[[int], None], ready: list[int], past: Sequence[Sized]) -> None:
    """Resume the ranks in ``ready``, the last first, until there are none.

    A rank that is resumed runs until it has to wait, and adds to ``ready`` those that waited for it. Any
    order gives the same result. But a rank can be only a microbatch or so ahead of its neighbour, so without
    a window every microbatch goes through all ranks; more of them than the caches hold take twice the time.

    Args:
        resume: runs a rank.
        ready: the ranks that can run; empty at the end.
        past: what each rank has done so far. One that is ahead of the window waits for it to move on.
    """
    ahead: list[int] = []
    end = _WINDOW
    while ready:
        rank = ready.pop()
        if len(past[rank]) > end:
            ahead.append(rank)
        else:
            resume(rank)
        if not ready:
            ready += reversed(ahead)
            ahead.clear()
            end += _WINDOW
