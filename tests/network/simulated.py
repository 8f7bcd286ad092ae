"""Run a function on every rank of a simulated network, each with a transport of its own."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from ppfunc.runtime.control.control import Control
from ppfunc.runtime.control.tree import RankTree, Verdict
from ppfunc.runtime.ports.protocols import Among, Collective, Route
from ppfunc.runtime.values.errors import LinkError
from ppfunc.stage.process import act_on_interrupts
from tests.network.network import Fault, Member, Network
from tests.network.scheduler import RankResult
from tests.network.wires import SimulatedCollective, Wires


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

    def transport(self, rank: int) -> "SimulatedTransport":
        """Return the transport of a rank; it sends messages in ``run`` only."""
        return self._transports[rank]

    def run(self, function: "Callable[[int, SimulatedTransport], Any]") -> list[RankResult]:
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
        self.post, self.wait = partial(wires.post, self.rank), partial(wires.wait, self.rank)

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

    def end(self, *args: Any, **named: Any) -> torch.Tensor | None:
        try:
            return super().end(*args, **named)
        finally:
            self.links.settled()

    def tear_down(self) -> None:
        self._wires.disconnect(self.rank)


class SimulatedLinks:
    """Implements :class:`~ppfunc.runtime.control.tree.Links` of one rank over a simulated network."""

    def __init__(self, network: Network, rank: int) -> None:
        self._network, self._member = network, network.members[rank]
        self.rank, self.size = rank, len(network.members)

    @property
    def generation(self) -> int:
        return self._member.generation

    def operation(self, text: str) -> None:
        """Begin an operation of the rank that sends nothing, such as a computation."""
        self._network.operation(self.rank, text)

    def send(self, peer: int, channel: str, data: bytes) -> None:
        self._network.operation(self.rank, f"send {channel} to {peer}")
        pipe = self._network.pipe(self.generation, self.rank, peer, channel)
        pipe.send(self._network.delay(self.rank), lambda: pipe.arrived.append(data))

    def recv(self, peer: int, channel: str) -> bytes:
        self._network.operation(self.rank, f"recv {channel} of {peer}")
        pipe = self._network.pipe(self.generation, peer, self.rank, channel)
        act_on_interrupts()
        self._network.wait(self.rank, peer, f"a message ({channel})", lambda: bool(pipe.arrived), pipe)
        act_on_interrupts()
        return pipe.arrived.popleft()

    def check(self) -> None:
        self._network.operation(self.rank, "check")
        neighbours = RankTree.over(range(self.size), self.rank).neighbours
        self._require_well({self.rank} | (self._member.lost & {*neighbours}))

    def vote(self, step: int) -> None:
        self._network.operation(self.rank, f"vote {step}")
        self._require_well({self.rank})
        self._member.voted, self._member.settling = step, True

    def commit(self, step: int) -> None:
        network = self._network
        network.operation(self.rank, f"commit {step}")
        if self.rank == 0:
            if len(network.published) > self.generation:  # whether this rank has heard of it or not
                raise LinkError(0, "failed", "a failure has been published")
            self._member.settling, network.committed = True, step + 1
            network.log(f"step {step} is committed")
        self._member.voted = None

    def settled(self) -> None:
        """Note that the step that was voted for or committed has ended here."""
        self._member.voted, self._member.settling = None, False

    def publish(self, failure: str) -> str:
        network = self._network
        network.operation(self.rank, "publish", can_fail=False)
        generation = self.generation
        if generation == len(network.published):
            network.published.append(Verdict(network.committed, failure))
            network.log(f"failure {generation} is published by rank {self.rank}")
            for member in network.members:
                network.soon(partial(self._hear, member, generation + 1))
        self._member.generation, self._member.voted = generation + 1, None
        return network.published[generation].failure

    @staticmethod
    def _hear(member: Member, failures: int) -> None:
        member.heard = max(member.heard, failures)

    def suspect(self, peer: int) -> tuple[int, str]:
        self._network.operation(self.rank, f"suspect {peer}", can_fail=False)
        awaited = [peer, *(awaited for _, awaited, _ in self._network.waits(peer))]
        circle = self.rank in awaited or awaited[-1] in awaited[:-1]
        return peer if circle else awaited[-1], ""

    def close(self) -> None:
        if self._member.ended is None:
            self._network.operation(self.rank, "close")
            self._network.close(self.rank)
            self._member.ended = RuntimeError(
                f"got a call on the transport of rank {self.rank}, which has been closed"
            )

    def _require_well(self, peers: set[int]) -> None:
        for peer in sorted(peers):
            if (trouble := self._network.trouble(self.rank, peer)) is not None:
                raise trouble
