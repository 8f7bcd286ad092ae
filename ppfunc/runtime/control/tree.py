"""Use a binary tree of ranks: exchange messages along it, decide which failure is the first, and find the
rank, or the link, that holds up the others. Nothing here has sockets, threads or clocks.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple, Protocol, Self

from ..values.errors import AgreementError

BEGIN, GATHER, END = "begins a step", "gathers texts", "ends a step"
"""Kinds of messages, by what a rank does that sends or expects one."""

TEXT = "text"  # the channel of what is sent to one rank

MEETING = -1  # what ranks vote for before the first step: that all have met
_KEPT = 16  # failures that a rank which comes late receives


class Links(Protocol):
    """Carries messages of bytes between ranks, and decides in one place which failure is the first.

    Messages of one channel from one rank to another arrive in order. ``generation`` counts the calls of
    ``publish`` on this rank. Messages of an earlier generation are dropped.

    A rank decides alone whether it fails a step until it votes. From then on only rank 0 does. Rank 0 either
    commits the step, or a failure came first. It announces a commit down the tree. No failure can undo it.

    A call that raises an interrupt, such as KeyboardInterrupt, has done nothing but wait. All but ``publish``
    and ``suspect`` raise RuntimeError after ``close``.
    """

    rank: int
    size: int

    @property
    def generation(self) -> int: ...

    def send(self, peer: int, channel: str, data: bytes) -> None:
        """Send a message of any length without waiting. A peer that is gone does not receive it."""

    def recv(self, peer: int, channel: str) -> bytes:
        """Receive the next message.

        Raises:
            LinkError: no message comes, and the peer is gone or late, or a failure was published. After
                ``vote(step)``, a failure published after rank 0 committed that step does not raise.
        """

    def check(self) -> None:
        """Raise LinkError for a published failure (peer -1), or for a neighbour in the tree that is gone."""

    def vote(self, step: int) -> None:
        """Vote for this step, unless ``check`` raises: from now on rank 0 alone decides whether it fails."""

    def commit(self, step: int) -> None:
        """Mark the step committed. Rank 0 calls it first, unless ``check`` raises, others by its message."""

    def publish(self, failure: str) -> str:
        """Publish a failure of this generation, and begin the next generation.

        Returns:
            The failure that was published first, the same on every rank that can be reached.
        """

    def suspect(self, peer: int) -> tuple[int, str]:
        """Return the rank that holds up a late peer, and its state: the peer, or whom it waits for."""

    def close(self) -> None:
        """End all connections, so that peers that wait raise at once."""


class RankTree(NamedTuple):
    """Describe a binary tree over some ranks, as a member sees it.

    Args:
        parent: the rank above, None at the top.
        children: the ranks below.
    """

    parent: int | None
    children: Sequence[int]

    @classmethod
    def over(cls, members: Sequence[int], rank: int) -> Self:
        """Return the tree as ``rank`` sees it: the member at place n has those at 2n + 1, 2n + 2 below it.

        >>> RankTree.over((0, 4, 8, 12), 4).neighbours
        [0, 12]
        """
        place = members.index(rank)
        parent = members[(place - 1) // 2] if place else None
        return cls(parent, members[2 * place + 1 : 2 * place + 3])

    @property
    def neighbours(self) -> list[int]:
        """Return the rank above, if any, and the ranks below."""
        above = [] if self.parent is None else [self.parent]
        return [*above, *self.children]


class TreeMessages:
    """Sends and receives the messages of one tree.

    Args:
        links: the links that carry them.
        members: the ranks of the tree, the same at each of them.
    """

    def __init__(self, links: Links, members: Sequence[int]) -> None:
        self._links = links
        # Another channel for each tree. A channel has 8 bytes.
        self._channel = sha256(repr([*members]).encode()).hexdigest()[:8]
        tree = RankTree.over(members, links.rank)
        self.size, self.top = len(members), members[0]
        self.parent, self.children = tree.parent, tree.children

    def send(self, kind: str, text: str, *peers: int) -> None:
        """Send a text to neighbours."""
        data = f"{kind}\n{text}".encode()
        for peer in peers:
            self._links.send(peer, self._channel, data)

    def send_down(self, kind: str, text: str) -> None:
        self.send(kind, text, *self.children)

    def recv(self, peer: int, kind: str) -> str:
        """Receive the next text of a neighbour.

        Raises:
            AgreementError: the text is of another kind.
        """
        theirs, _, text = self._links.recv(peer, self._channel).decode().partition("\n")
        if theirs != kind:
            raise AgreementError(
                f"the ranks disagree on what comes next: rank {self._links.rank} {kind}, rank {peer}"
                f" {theirs}; every rank must make the same calls in the same order"
            )
        return text

    def gather_texts(self, text: str) -> dict[int, str]:
        """Gather the texts of all ranks of the tree, by rank. Collective."""
        return dict(self.share(GATHER, self.collect(GATHER, [self._links.rank, text])))

    def collect(self, kind: str, value: Any) -> list[Any]:
        """Collect the values of this rank and of the ranks below; JSON."""
        values = [value]
        for child in self.children:
            values += json.loads(self.recv(child, kind))
        return values

    def share(
        self,
        kind: str,
        collected: list[Any],
        conclude: Callable[[list[Any]], Any] = lambda values: values,
        step: int | None = None,
    ) -> Any:
        """Send the collected values to the parent; at the top, conclude from the values of all ranks. Forward
        the conclusion to the children, and return it.

        Args:
            kind: the kind of the messages.
            collected: the result of :meth:`collect`.
            conclude: makes the conclusion from the values of all ranks; JSON.
            step: the step that every rank votes for, and the top commits with its conclusion, if one ends.
        """
        if self.parent is None:
            concluded = conclude(collected)
            if step is not None:
                self._links.commit(step)
            self.send_down(kind, json.dumps(concluded))
            return concluded
        if step is not None:
            self._links.vote(step)
        self.send(kind, json.dumps(collected), self.parent)
        text = self.recv(self.parent, kind)
        if step is not None:
            self._links.commit(step)
        self.send_down(kind, text)
        return json.loads(text)


# -- the first failure


class Verdict(NamedTuple):
    """Hold the first failure of a generation, and how many steps rank 0 had committed before it."""

    committed: int
    failure: str

    def stops(self, voted: int | None) -> bool:
        """Tell whether a rank that has voted for the step ``voted``, if any, has to stop.

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
        """Begin the next generation; return the failure of the generation that ends."""
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
        """Make a failure the verdict of its generation, unless the generation has a verdict."""
        self._learn(generation, Verdict(self._committed, failure))

    def note_gone(self, peer: int, failure: str) -> None:
        """Note that a neighbour is gone: a failure of the first generation that has none."""
        if peer not in self.gone:
            self.gone.add(peer)
            self.connected.discard(peer)
            self.report(max(self.generation, max(self.verdicts, default=-1) + 1), failure)

    def connect(self, neighbour: int) -> None:
        """Note that a neighbour has connected; send the verdicts to a rank below."""
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
        begun: numbers of collectives of its stages that it has begun, by the ranks of their group.
        cut: neighbours in the tree whose hosts do not answer.
    """

    awaits: int | None = None
    stepping: bool | None = None
    ended: int = 0
    begun: Mapping[str, int] = {}
    cut: Sequence[int] = ()


def find_culprit(rank: int, size: int, answers: Mapping[int, Answer]) -> tuple[int, str]:
    """Find the rank that holds up this rank, and its state.

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
