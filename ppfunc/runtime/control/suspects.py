"""Find the rank that holds up the others, or the link that has failed, from the states of all ranks."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .tree import RankTree


class Answer(NamedTuple):
    """Describe the state of a rank, for peers that wait for it.

    Args:
        awaits: the rank whose message, or part in a collective, it waits for; None where it may not wait.
        stepping: whether it is in a step; None where it does not say.
        ended: the steps that have ended on it.
        begun: how many collectives of its stages it has begun in each group, by the ranks of the group.
        cut: its neighbours in the tree whose hosts do not answer.
    """

    awaits: int | None = None
    stepping: bool | None = None
    ended: int = 0
    begun: Mapping[str, int] = {}
    cut: Sequence[int] = ()


def find_culprit(rank: int, size: int, answers: Mapping[int, Answer]) -> tuple[int, str]:
    """Return the rank that holds up this one, and its state.

    It ends the chain of those that wait for each other. A rank that does not answer is frozen, or lies behind
    one in the tree.

    >>> find_culprit(0, 3, {0: Answer(1), 1: Answer(2), 2: Answer(None, True)})
    (2, 'rank 2 is at work in its step')
    >>> find_culprit(0, 3, {0: Answer(1), 1: Answer(begun={"1-2": 4}), 2: Answer(begun={"1-2": 3})})[0]
    2
    >>> find_culprit(3, 4, {3: Answer(1), 1: Answer(0)})[0]  # 2 lies behind 0
    0
    >>> find_culprit(0, 2, {0: Answer(1, True, 4), 1: Answer(None, False, 4)})
    (1, 'rank 1 has not begun the step after 4 steps that rank 0 is in')
    >>> find_culprit(0, 2, {0: Answer(1, cut=[1])})
    (1, 'the link between rank 0 and rank 1 has failed')
    """
    chain = [rank]
    while chain[-1] in answers and (awaited := _awaited(chain[-1], answers)) is not None:
        if awaited in chain:  # in a circle: whom this rank waits for
            return chain[1], f"rank {chain[1]} also waits"
        chain.append(awaited)
    culprit = chain[-1]
    if culprit in answers:
        return culprit, _state(culprit, answers[culprit], answers[rank], rank)
    for silent in (culprit, *range(size)):
        asked = [peer for peer in RankTree.over(range(size), silent).neighbours if peer in answers]
        if silent not in answers and asked:
            break
    if silent in answers[asked[0]].cut:
        return silent, f"the link between rank {asked[0]} and rank {silent} has failed"
    return silent, f"rank {silent} does not answer: its process is stopped, or its host out of reach"


def _awaited(rank: int, answers: Mapping[int, Answer]) -> int | None:
    """Return the rank that this one waits for: in a collective of a stage, one that has not come to it."""
    if answers[rank].awaits is not None:
        return answers[rank].awaits
    for members, begun in answers[rank].begun.items():
        for peer in map(int, members.split("-")):
            if peer not in answers or answers[peer].begun.get(members, 0) < begun:
                return peer
    return None


def _state(rank: int, theirs: Answer, mine: Answer, asking: int) -> str:
    if theirs.stepping:
        return f"rank {rank} is at work in its step"
    if theirs.stepping is None or not mine.stepping:
        return f"rank {rank} is at work"
    return f"rank {rank} has not begun the step after {theirs.ended} steps that rank {asking} is in"
