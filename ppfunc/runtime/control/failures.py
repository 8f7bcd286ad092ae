"""Decide along a tree of ranks which failure is the first, and find the rank, or the link, that holds up the
others: without sockets, threads or clocks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .tree import RankTree

MEETING = -1  # what ranks vote for before the first step: that all have met
_KEPT = 16  # failures that a rank which comes late receives


class Verdict(NamedTuple):
    """Hold the first failure of a generation, and how many steps rank 0 had committed before it."""

    committed: int
    failure: str

    def stops(self, voted: int | None) -> bool:
        """Tell whether a rank has to stop; ``voted`` is the step that it has voted for, None for no step.

        A step that rank 0 had committed goes on to its end.
        """
        return voted is None or self.committed <= voted


class FailureTree:
    """Knows the failures of one rank, and informs its neighbours.

    A failure travels up to the highest rank that can be reached, which takes the first as that of its
    generation and sends it down. At the top, one that comes while the outcome of a vote is unknown waits for
    it.

    Args:
        tree: over all ranks, as this one sees it.
        send: ``send(neighbour, kind, *message)`` lets the neighbour call ``receive``.
        on_verdict: called with the generation and its verdict, once it is known here.

    Attributes:
        generation: number of failures that this rank has handled.
        verdicts: the last ones, by generation.
        connected: the neighbours that receive messages.
        gone: the neighbours that have ended.
    """

    def __init__(
        self, tree: RankTree, send: Callable[..., None], on_verdict: Callable[[int, Verdict], None]
    ) -> None:
        self.generation = 0
        self.verdicts: dict[int, Verdict] = {}
        self.connected: set[int] = set()
        self.gone: set[int] = set()
        self._tree, self._send, self._on_verdict = tree, send, on_verdict
        self._voted: int | None = None
        self._committed = MEETING
        self._deferred: list[tuple[int, str]] = []  # failures that came between a vote and its outcome

    @property
    def stopped(self) -> bool:
        """Tell whether this rank has to fail its step."""
        verdict = self.verdicts.get(self.generation)
        return verdict is not None and verdict.stops(self._voted)

    def lost(self, peer: int) -> bool:
        """Tell whether a peer is gone and not needed. After its vote, a rank waits for the outcome."""
        return self._voted is None and peer in self.gone

    def vote(self, step: int) -> None:
        """Vote for this step: from now on rank 0 alone decides whether it fails."""
        self._voted = step

    def commit(self, step: int) -> None:
        """Mark the step committed: no failure can undo it. Report the failures that came meanwhile."""
        self._committed, self._voted = step + 1, None
        deferred, self._deferred = self._deferred, []
        for generation, failure in deferred:
            self.report(generation, failure)

    def publish(self, failure: str) -> None:
        """Report a failure of this rank, which fails its step with it."""
        self._voted, self._deferred = None, []
        self.report(self.generation, failure)

    def notice(self) -> str:
        """Begin the next generation; return the failure of the one that ends."""
        self.generation += 1
        return self.verdicts[self.generation - 1].failure

    def report(self, generation: int, failure: str) -> None:
        """Bring a failure to the rank that decides."""
        if generation in self.verdicts:
            return
        if self._tree.parent in self.connected:
            self._send(self._tree.parent, "failed", generation, failure)
        elif self._voted is not None:
            self._deferred.append((generation, failure))
        else:
            self.decide(generation, failure)

    def decide(self, generation: int, failure: str) -> None:
        """Make a failure the verdict of its generation, unless there is one."""
        self._learn(generation, Verdict(self._committed, failure))

    def note_gone(self, peer: int, failure: str) -> None:
        """Note that a neighbour is gone: a failure of the first generation that has none."""
        if peer not in self.gone:
            self.gone.add(peer)
            self.connected.discard(peer)
            self.report(max(self.generation, max(self.verdicts, default=-1) + 1), failure)

    def connect(self, neighbour: int) -> None:
        """Note that a neighbour has connected; send a rank below what has been decided."""
        self.connected.add(neighbour)
        if neighbour != self._tree.parent:
            for generation, verdict in self.verdicts.items():
                self._send(neighbour, "decided", generation, *verdict)

    def receive(self, kind: str, generation: int, *facts: Any) -> None:
        """Handle the message of a neighbour: a failure, or the verdict of a generation."""
        if kind == "failed":
            self.report(generation, *facts)
        else:
            self._learn(generation, Verdict(*facts))

    def _learn(self, generation: int, verdict: Verdict) -> None:
        if generation in self.verdicts:
            return
        self.verdicts[generation] = verdict
        self.verdicts.pop(min(self.generation, generation) - _KEPT, None)
        for child in self._tree.children:
            self._send(child, "decided", generation, *verdict)
        self._on_verdict(generation, verdict)


# -- who holds up the others


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
    >>> find_culprit(0, 2, {0: Answer(1, True, 4), 1: Answer(None, False, 4)})[1].partition(":")[0]
    'rank 1 has not begun the step after 4 steps that rank 0 is in; it may be in one over another transport'
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
    return (
        f"rank {rank} has not begun the step after {theirs.ended} steps that rank {asking} is in; it may be"
        " in one over another transport: every rank must take its steps in the same order"
    )
