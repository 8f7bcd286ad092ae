"""Exchange messages between ranks along a binary tree, and decide along it which failure is the first."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Self

from ..errors import AgreementError

# Kinds of messages: what a rank does that sends or expects one.
BEGIN, GATHER, END = "begins a step", "gathers texts", "ends a step"
KEY, TEXT = "key", "text"  # channels besides those of trees


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
        """Publish a failure of this generation and begin the next one.

        Returns:
            The failure that was published first, the same on every rank that can be reached.
        """

    def suspect(self, peer: int) -> tuple[int, str]:
        """Return the rank that holds up a late peer, and its state: the peer, or whom it waits for."""

    def close(self) -> None:
        """End all connections, so that peers that wait raise at once."""


class RankTree(NamedTuple):
    """Describe a binary tree over some ranks, as one of them sees it.

    Args:
        members: the ranks; that at place n has those at 2n + 1 and 2n + 2 below it.
        parent: the rank above, None at the top.
        children: the ranks below.
    """

    members: Sequence[int]
    parent: int | None
    children: Sequence[int]

    @classmethod
    def over(cls, members: Sequence[int], rank: int) -> Self:
        """Return the tree as ``rank`` sees it, over ranks in this order.

        >>> RankTree.over((0, 4, 8, 12), 4).neighbours
        [0, 12]
        """
        place = members.index(rank)
        parent = members[(place - 1) // 2] if place else None
        return cls(members, parent, members[2 * place + 1 : 2 * place + 3])

    @property
    def neighbours(self) -> list[int]:
        """Return the rank above, if there is one, and those below."""
        above = [] if self.parent is None else [self.parent]
        return [*above, *self.children]


class TreeMessages:
    """Sends and receives the messages of one tree.

    Args:
        links: carry them.
        members: the ranks of the tree.
        channel: its name, another one for each tree.
    """

    def __init__(self, links: Links, members: Sequence[int], channel: str) -> None:
        self._links, self._channel = links, channel
        tree = RankTree.over(members, links.rank)
        self.top, self.parent, self.children = members[0], tree.parent, tree.children

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
            AgreementError: it is of another kind.
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
        return self.share(self.collect(text))

    def collect(self, text: str) -> str:
        """Collect the texts of this rank and those below."""
        texts = [(self._links.rank, text)]
        for child in self.children:
            texts += json.loads(self.recv(child, GATHER))
        return json.dumps(texts)

    def share(self, collected: str) -> dict[int, str]:
        """Give what is collected to the rank above, and what this returns to those below."""
        if self.parent is not None:
            self.send(GATHER, collected, self.parent)
            collected = self.recv(self.parent, GATHER)
        self.send_down(GATHER, collected)
        return dict(json.loads(collected))


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

    @property
    def undecided(self) -> int:
        """Return the first generation without a verdict, from that of this rank on."""
        return max(self.generation, max(self.verdicts, default=-1) + 1)

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
            self.report(self.undecided, failure)

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
