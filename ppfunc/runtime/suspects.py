"""Find the rank that holds up the others, from what each says that it is doing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .failure_tree import Tell
from .rank_tree import path


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
    silent = next(r for r in path(rank, suspect) if r not in answers)
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


class Questions:
    """Asks all ranks whom they wait for: a question spreads over a tree, and answers come back on its way.

    Args:
        rank: this one.
        neighbours: those in the tree.
        tell: sends a message to a neighbour.
        answer: what this rank says of itself to others.

    Attributes:
        answers: those to the last question of this rank, by rank.
    """

    def __init__(self, rank: int, neighbours: Sequence[int], tell: Tell, answer: Callable[[], Answer]) -> None:
        self.answers: dict[int, Answer] = {}
        self._rank, self._neighbours, self._tell, self._answer = rank, neighbours, tell, answer
        self._brought: dict[str, int] = {}  # questions of others, and the neighbour that brought each
        self._asked = 0

    def ask(self, mine: Answer) -> None:
        """Begin a question; this rank's own answer is ``mine``."""
        self._asked += 1
        self.answers = {self._rank: mine}
        for neighbour in self._neighbours:
            self._tell(neighbour, "whom", self._own)

    def hear(self, peer: int, kind: str, *message: Any) -> None:
        """Take up a question or an answer that a neighbour brings."""
        if kind == "whom" and message[0] not in self._brought:
            (question,) = message
            self._brought[question] = peer
            self._tell(peer, "for", question, self._rank, self._answer())
            for neighbour in self._neighbours:
                if neighbour != peer:
                    self._tell(neighbour, "whom", question)
        elif kind == "for":
            question, rank, answer = message
            if question == self._own:
                self.answers[rank] = Answer(*answer)
            elif question in self._brought:
                self._tell(self._brought[question], "for", question, rank, answer)

    @property
    def _own(self) -> str:
        return f"{self._rank}.{self._asked}"
