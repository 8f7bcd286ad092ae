"""The links of one rank of a simulated network, over which its control messages go."""

from ppfunc.runtime.control.tree import RankTree
from ppfunc.stage.interrupts import act_on_interrupts

from .network import Network


class SimulatedLinks:
    """The :class:`~ppfunc.runtime.control.tree.Links` of one rank over a simulated network."""

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
        self._network.operation(self.rank, f"commit {step}")
        if self.rank == 0:
            self._network.commit(step)
        self._member.voted = None

    def settled(self) -> None:
        """Note that the step that was voted for or committed has ended here."""
        self._member.voted, self._member.settling = None, False

    def publish(self, failure: str) -> str:
        self._network.operation(self.rank, "publish", can_fail=False)
        return self._network.publish(self.rank, failure)

    def suspect(self, peer: int) -> tuple[int, str]:
        self._network.operation(self.rank, f"suspect {peer}", can_fail=False)
        return self._network.suspect(self.rank, peer), ""

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
