"""Exchange messages between ranks, directly and along a binary tree."""

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple, Protocol, Self

from ..values.errors import AgreementError

# Kinds of messages: what a rank does that sends or expects one.
BEGIN, GATHER, END = "begins a step", "gathers texts", "ends a step"
TEXT = "text"  # the channel of what is sent to one rank


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
        """Return the rank above, if there is one, and those below."""
        above = [] if self.parent is None else [self.parent]
        return [*above, *self.children]


class TreeMessages:
    """Sends and receives the messages of one tree.

    Args:
        links: carry them.
        members: the ranks of the tree, the same at each of them.
    """

    def __init__(self, links: Links, members: Sequence[int]) -> None:
        self._links = links
        # Another one for each tree. A channel has 8 bytes.
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
