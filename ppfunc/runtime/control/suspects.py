"""Find the rank that holds up the others, or the link that has failed, from the states of all ranks."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .tree import path


class Answer(NamedTuple):
    """Describe the state of a rank, for peers that wait for it.

    Args:
        awaits: the rank whose message, or part in a collective, it waits for; None where it may not wait.
        stepping: whether it is in a step; None where it does not say.
        ended: the steps that have ended on it.
        peers: the ranks that it runs stages with, in whose collectives they wait for each other, and it.
        collectives: how many of these it has begun.
        cut: its neighbours in the tree whose hosts do not answer.
    """

    awaits: int | None = None
    stepping: bool | None = None
    ended: int = 0
    peers: Sequence[int] = ()
    collectives: int = 0
    cut: Sequence[int] = ()


def find_culprit(rank: int, answers: Mapping[int, Answer]) -> tuple[int, str]:
    """Return the rank that holds up this one, and its state.

    It ends the chain of those that wait for each other. A rank that does not answer is frozen, or cut off on
    the way through the tree: by a rank that is frozen, or a link that has failed.

    >>> find_culprit(0, {0: Answer(1), 1: Answer(2), 2: Answer(None, True)})
    (2, 'rank 2 is at work in its step')
    >>> find_culprit(3, {3: Answer(2), 1: Answer(0)})[0]  # 0 lies between 3 and 2
    0
    >>> find_culprit(0, {0: Answer(1, True, 4), 1: Answer(None, False, 4)})
    (1, 'rank 1 has not begun the step after 4 steps that rank 0 is in')
    >>> find_culprit(0, {0: Answer(1, cut=[1])})
    (1, 'the link between rank 0 and rank 1 has failed')
    """
    chain, suspect = [rank], rank
    while suspect in answers and (following := _awaited(suspect, answers)) is not None:
        suspect = following
        if suspect in chain:  # in a circle: whom this rank waits for
            suspect = _awaited(rank, answers) or 0
            return suspect, f"rank {suspect} also waits"
        chain.append(suspect)
    if suspect in answers:
        return suspect, _state(suspect, answers[suspect], answers[rank], rank)
    way = path(rank, suspect)
    place = next(n for n, between in enumerate(way) if between not in answers)
    silent, before = way[place], way[place - 1]
    if silent in answers[before].cut:
        return silent, f"the link between rank {before} and rank {silent} has failed"
    return silent, f"rank {silent} does not answer: its process is stopped, or its host out of reach"


def _awaited(rank: int, answers: Mapping[int, Answer]) -> int | None:
    """Return the rank that this one waits for: in a collective of a stage, one that has not come to it."""
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
