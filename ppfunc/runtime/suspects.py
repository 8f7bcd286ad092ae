"""Find the rank that holds up the others, from what each says that it is doing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Answer(NamedTuple):
    """The state of a rank, as it tells it.

    Args:
        awaits: the rank whose message, or part in a collective, it waits for; None where it is not known to wait.
        stepping: whether it is in a step; None where it does not say.
        ended: the steps that have ended on it.
        peers: the ranks that it runs stages with, which wait for each other in collectives of stages, and it.
        collectives: how many of these it has begun.
    """

    awaits: int | None = None
    stepping: bool | None = None
    ended: int = 0
    peers: Sequence[int] = ()
    collectives: int = 0


def find_culprit(rank: int, answers: Mapping[int, Answer]) -> tuple[int, str]:
    """The rank that holds up this one, and what is known of it: at the end of the chain of those that wait for each other.

    A rank that does not answer is frozen, or cut off by a frozen one on the way through the tree.

    >>> find_culprit(0, {0: Answer(1), 1: Answer(2), 2: Answer(None, True)})
    (2, 'rank 2 is at work in its step')
    >>> find_culprit(3, {3: Answer(2), 1: Answer(0)})[0]  # 0 lies between 3 and 2
    0
    >>> find_culprit(0, {0: Answer(1, True, 4), 1: Answer(None, False, 4)})
    (1, 'rank 1 has not begun the step after 4 steps that rank 0 is in')
    """
    seen, suspect = [rank], rank
    while suspect in answers and (following := _awaited(suspect, answers)) is not None:
        suspect = following
        if suspect in seen:  # in a circle: whom this rank waits for
            suspect = _awaited(rank, answers) or 0
            return suspect, f"rank {suspect} waits, too"
        seen.append(suspect)
    if suspect in answers:
        return suspect, _state(suspect, answers[suspect], answers[rank], rank)
    silent = next(r for r in _path(rank, suspect) if r not in answers)
    return silent, f"rank {silent} does not answer: its process is stopped, or its host out of reach"


def _awaited(rank: int, answers: Mapping[int, Answer]) -> int | None:
    """Find the rank that this one waits for: in a collective of a stage, one that has not come to it, if there is one."""
    mine = answers[rank]
    if mine.awaits is not None or not mine.stepping:
        return mine.awaits
    others = [peer for peer in mine.peers if peer != rank]
    silent = [peer for peer in others if peer not in answers]
    behind = [peer for peer in others if peer in answers and answers[peer].collectives < mine.collectives]
    return next(iter(silent), min(behind, key=lambda peer: answers[peer].collectives, default=None))


def _state(rank: int, theirs: Answer, mine: Answer, asking: int) -> str:
    if theirs.stepping:
        return f"rank {rank} is at work in its step"
    if theirs.stepping is None or not mine.stepping:
        return f"rank {rank} is at work"
    return f"rank {rank} has not begun the step after {theirs.ended} steps that rank {asking} is in"


def _path(one: int, other: int) -> list[int]:
    """The way through the tree.

    >>> _path(3, 5)
    [3, 1, 0, 2, 5]
    """
    up, down = [one], [other]
    while up[-1] != down[-1]:
        longer = up if up[-1] > down[-1] else down
        longer.append((longer[-1] - 1) // 2)
    return up + down[-2::-1]
