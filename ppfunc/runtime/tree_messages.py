"""Messages of a rank to and from its neighbours in a tree, each of a kind that both ends expect."""

from __future__ import annotations

import json
from collections.abc import Sequence

from .errors import AgreementError
from .links import Links
from .rank_tree import RankTree

BEGIN, SHAPES, GATHER, LOSSES, END = b"B", b"S", b"G", b"L", b"E"
_CALLS = {BEGIN: "begins a step", SHAPES: "begins a step", GATHER: "gathers texts", LOSSES: "ends a step", END: "ends a step"}


class TreeMessages:
    """The messages of one tree.

    Args:
        links: carry them.
        members: the ranks of the tree.
        channel: its name, another one for each tree.
    """

    def __init__(self, links: Links, members: Sequence[int], channel: str) -> None:
        self._links, self._channel = links, channel
        tree = RankTree.over(members, links.rank)
        self.top, self.parent, self.children = members[0], tree.parent, tree.children

    def send(self, peer: int, kind: bytes, data: bytes) -> None:
        self._links.send(peer, self._channel, kind + data)

    def send_down(self, kind: bytes, data: bytes) -> None:
        for child in self.children.values():
            self.send(child, kind, data)

    def recv(self, peer: int, kind: bytes) -> bytes:
        """Receive the next message of a neighbour.

        Raises:
            AgreementError: it is of another kind.
        """
        data = self._links.recv(peer, self._channel)
        if data[:1] != kind:
            raise AgreementError(
                f"the ranks disagree on what comes next: rank {self._links.rank} {_CALLS[kind]}, rank {peer} "
                f"{_CALLS[data[:1]]}; every rank must make the same calls in the same order"
            )
        return data[1:]

    def gather_texts(self, text: str) -> dict[int, str]:
        """The texts of all ranks of the tree. Collective."""
        texts = {self._links.rank: text}
        for child in self.children.values():
            texts |= self._recv_texts(child)
        if self.parent is not None:
            self.send(self.parent, GATHER, json.dumps(texts).encode())
            texts = self._recv_texts(self.parent)
        self.send_down(GATHER, json.dumps(texts).encode())
        return texts

    def _recv_texts(self, peer: int) -> dict[int, str]:
        return {int(rank): text for rank, text in json.loads(self.recv(peer, GATHER)).items()}
