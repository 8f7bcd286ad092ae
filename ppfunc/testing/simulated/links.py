"""Carry the control messages of one rank of a simulated network."""

from functools import partial

from ppfunc.runtime.control.failure_tree import Verdict
from ppfunc.runtime.control.tree import RankTree
from ppfunc.runtime.errors import LinkError
from ppfunc.stage.interrupts import act_on_interrupts

from .network import Member, Network


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

    def interrupt_later(self, number: int) -> None:
        """Send SIGINT to this rank in its next operation."""
        self._member.interrupted = True

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
