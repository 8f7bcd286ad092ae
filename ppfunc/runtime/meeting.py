"""Bring the processes of one transport together: each learns where the others listen, or that they are gone."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Set
from contextlib import suppress
from typing import Any, Protocol

from .errors import LinkError
from .failure_tree import Tell
from .rank_tree import RankTree
from .rendezvous import Rendezvous
from .sockets import Address

_PROBE = 0.5  # seconds between looks after ranks that have not come; more where these take long
_LEAVING = 1.0  # seconds for the store to take down that this rank leaves


class Host(Protocol):
    """Who joins the rank above, and hears which ranks have not come and are gone, and whether the store is."""

    @property
    def closed(self) -> bool: ...
    def join(self, parent: int, address: Address) -> None: ...
    def miss(self, peer: int) -> None: ...
    def lose_store(self, server: int) -> None: ...


class Meeting:
    """Knows where ranks listen. The address of the rank above is asked of the store, the others travel along the tree.

    Args:
        rendezvous: where ranks find each other's addresses.
        tree: over all ranks.
        mine: the address of this one.
        tell: sends a message to a neighbour.
        gone: the neighbours that are gone, now and later.

    Attributes:
        addresses: of the ranks that have come.
    """

    def __init__(self, rendezvous: Rendezvous, tree: RankTree, mine: Address, tell: Tell, gone: Set[int]) -> None:
        self._rendezvous, self._tree, self._tell, self._gone = rendezvous, tree, tell, gone
        self.addresses = {rendezvous.rank: mine}
        rendezvous.write(f"address/{rendezvous.rank}", json.dumps(mine))

    @property
    def complete(self) -> bool:
        """Whether all ranks have come."""
        return len(self.addresses) == len(self._tree.members)

    def greet(self, neighbour: int) -> None:
        """Tell a neighbour that has come where the others are."""
        self._tell(neighbour, "at", self.addresses)

    def hear(self, peer: int, kind: str, *message: Any) -> None:
        """Learn of ranks that have come, and pass it on."""
        if kind != "at":
            return
        told = {int(rank): Address(*address) for rank, address in message[0].items()}
        new = {rank: address for rank, address in told.items() if rank not in self.addresses}
        self.addresses |= new
        for neighbour in self._tree.neighbours:
            if new and neighbour != peer:
                self._tell(neighbour, "at", new)

    def run(self, host: Host) -> None:
        """Join the rank above, and look after those that have not come, until all have. Only here a frozen store holds up anything."""
        pause, probe, met = 0.001, time.monotonic() + _PROBE, self._tree.parent is None
        while not host.closed and not (met and self.complete):
            try:
                met = met or self._meet_parent(host)
                if time.monotonic() > probe:
                    probe = self._probe(host.miss)
            except LinkError as error:
                host.lose_store(error.peer)
                return
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _meet_parent(self, host: Host) -> bool:
        """Join the rank above once it is there. Returns whether there is nothing left to do."""
        parent = self._tree.parent
        assert parent is not None
        address = self._rendezvous.read(f"address/{parent}")
        if address is None:
            return parent in self._gone
        host.join(parent, Address(*json.loads(address)))
        return True

    def _probe(self, miss: Callable[[int], None]) -> float:
        """Find out which ranks that have not come are gone: the highest rank looks after all. Returns when to look again."""
        began = time.monotonic()
        for peer in self._tree.neighbours if self._tree.parent is not None else self._tree.members[1:]:
            if peer in self.addresses or peer in self._gone:
                continue
            if not self._rendezvous.alive(peer) or self._rendezvous.read(f"left/{peer}") is not None:
                miss(peer)
        now = time.monotonic()
        return now + max(_PROBE, 10 * (now - began))

    def leave(self) -> None:
        """Say in the store that this rank has closed its transport, to those that have not met it: they cannot see its connections end."""
        if not self.complete:
            telling = threading.Thread(target=self._leave, name="ppfunc leaving", daemon=True)
            with suppress(RuntimeError):  # the interpreter is ending, and with it the process
                telling.start()
                telling.join(_LEAVING)

    def _leave(self) -> None:
        with suppress(LinkError):
            self._rendezvous.write(f"left/{self._rendezvous.rank}", "")
