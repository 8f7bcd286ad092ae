"""Run a function on every rank of a simulated network, each with a transport of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from ppfunc.runtime.control.control import Control
from ppfunc.runtime.transport.collective import Among, Collective
from ppfunc.runtime.transport.protocols import Call, Route, Transfer
from ppfunc.stage.interrupts import hold_interrupts

from .links import SimulatedLinks
from .network import Fault, Network
from .scheduler import RankResult
from .wires import SimulatedCollective, Wires


class Simulated:
    """Ranks in one process, each in a thread of its own, of which one runs at a time.

    At each operation of a transport (a message, a vote, a wait) the seed chooses who goes on. Time is
    virtual: messages take seeded delays, and a timeout passes as soon as nothing else can happen. The same
    seed gives the same run, provided that the functions depend on nothing else that changes.

    Data behaves as under gloo: in order on each link, sent when both ends have posted, and copied when it
    arrives, so that a sender which changes a tensor too early sends the change, and hears of it. Posted
    receives hold NaN until then.

    Args:
        ranks: how many.
        seed: decides every choice and every delay.
        faults: what goes wrong.
        timeout: seconds of virtual time after which a rank gives up waiting.
        latency: the longest delay of a message, in seconds of virtual time.

    Raises:
        ValueError: no ranks, no time, or a fault that cannot happen.

    Example:
        >>> network = Simulated(2, seed=0)
        >>> results = network.run(lambda rank, transport: transport.all_gather(str(rank)))
        >>> [result.value for result in results]
        [['0', '1'], ['0', '1']]
    """

    def __init__(
        self,
        ranks: int,
        seed: int,
        faults: Iterable[Fault] = (),
        *,
        timeout: float = 300.0,
        latency: float = 0.01,
    ) -> None:
        self._network = Network(ranks, seed, tuple(faults), timeout, latency)
        wires = Wires(self._network)
        self._transports = [SimulatedTransport(self._network, wires, rank) for rank in range(ranks)]

    @property
    def trace(self) -> tuple[str, ...]:
        """Return the events so far: virtual time, rank and number of each operation; arrivals and faults."""
        return tuple(self._network.trace)

    @property
    def operations(self) -> tuple[int, ...]:
        """Count the operations that each rank has begun; faults strike at these."""
        return tuple(member.operations for member in self._network.members)

    def transport(self, rank: int) -> SimulatedTransport:
        """Return the transport of a rank; it sends messages in ``run`` only."""
        return self._transports[rank]

    def run(self, function: Callable[[int, SimulatedTransport], Any]) -> list[RankResult]:
        """Call ``function(rank, transport)`` on every rank, until all have ended.

        Returns:
            How each has ended, by rank; with RankStopped where it was killed, or froze for ever.
        """
        return self._network.scheduler.run(
            [partial(function, rank, transport) for rank, transport in enumerate(self._transports)]
        )


class SimulatedTransport(Control):
    """Implements the transport of one rank of :class:`Simulated`. The thread of that rank alone uses it."""

    def __init__(self, network: Network, wires: Wires, rank: int) -> None:
        self._network, self._wires = network, wires
        self._collectives: dict[tuple[int, ...], SimulatedCollective] = {}
        super().__init__(SimulatedLinks(network, rank))
        self.links: SimulatedLinks

    def connect(self, routes: Iterable[Route], devices: Iterable[torch.device]) -> None:
        self._wires.connect(
            self.rank, sorted({route for route in routes if self.rank in (route.sender, route.receiver)})
        )

    def collective(self, among: Among) -> Collective:
        members = tuple(n for n in among if isinstance(n, int)) if isinstance(among, tuple) else (self.rank,)
        if among == "world":
            members = tuple(range(self.size))
        if len(members) == 1:
            return Collective()
        collective = SimulatedCollective(self._network, self.rank, members)
        return self._collectives.setdefault(members, collective)

    def post(self, batch: Sequence[Transfer]) -> Call | None:
        return self._wires.post(self.rank, batch) if batch else None

    def wait_recv(self, transfer: Transfer) -> Call | None:
        return self._wires.wait(self.rank, transfer)

    def wait_send(self, transfer: Transfer) -> Call | None:
        return self._wires.wait(self.rank, transfer)

    def end(self, *args: Any, **named: Any) -> torch.Tensor | None:
        try:
            return super().end(*args, **named)
        finally:
            self.links.settled()

    def hold_interrupts(self, later: bool = False) -> hold_interrupts:
        return hold_interrupts(self.links.interrupt_later if later else None)

    def tear_down(self) -> None:
        self._wires.disconnect(self.rank)
