"""The protocol of links: messages of bytes between ranks, and one place where the first failure is decided."""

from __future__ import annotations

from typing import Protocol


class Links(Protocol):
    """Messages of bytes between ranks, and one place where the first failure is decided.

    Messages of one channel from one rank to another arrive in order. ``generation`` counts the failures that this rank
    has taken notice of, by ``publish``; messages that were sent in an earlier generation are dropped.

    A rank decides alone whether it fails a step until it votes. From then on only rank 0 does, and tells by a message
    down the tree: either it has committed the step, and no failure can undo it, or a failure came first.

    A call that raises an interrupt, such as KeyboardInterrupt, was waiting, and has done nothing.
    """

    rank: int
    size: int

    @property
    def generation(self) -> int: ...

    def send(self, peer: int, channel: str, data: bytes) -> None:
        """Send a message of any length, without waiting until the peer receives it; one that is gone does not get it.

        The first message to a peer may wait until the two are connected.

        Raises:
            LinkError: the peer is gone, or has not come in time, or a failure has been published, while they were being connected.
        """
        ...

    def recv(self, peer: int, channel: str) -> bytes:
        """Receive the next message.

        Raises:
            LinkError: there is none, and the peer is gone or late, or a failure has been published; after ``vote(step)``
                a failure that was published when rank 0 had committed that step is no reason.
            RuntimeError: the links have been closed.
        """
        ...

    def check(self) -> None:
        """Raise where a failure has been published, or a neighbour in the tree is gone.

        Raises:
            LinkError: of the peer -1 and the kind ``"failed"``, or of the neighbour.
            RuntimeError: the links have been closed.
        """
        ...

    def vote(self, step: int) -> None:
        """From now on this rank cannot fail this step.

        Raises:
            LinkError: a failure has been published.
        """
        ...

    def commit(self, step: int) -> None:
        """From now on nobody can. Called on rank 0, and on the others once its message has come.

        Raises:
            LinkError: on rank 0, a failure has been published.
        """
        ...

    def publish(self, failure: str) -> str:
        """Publish a failure of this generation and begin the next one.

        Returns:
            The failure that was published first, the same on every rank that can be reached.
        """
        ...

    def suspect(self, peer: int) -> tuple[int, str]:
        """The rank that holds up a peer which is late, and what is known of it: the peer, or the one that it waits for itself,
        and so on."""
        ...

    def close(self) -> None:
        """End all connections, so that peers that wait raise at once."""
        ...
