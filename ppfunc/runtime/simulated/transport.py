"""The transport of one simulated rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

import torch

from ..control import Control
from ..transport import Call, Failure, Link, LossPart, Mode, Transfer
from .links import SimulatedLinks
from .network import Network
from .wires import Wires


class SimulatedTransport:
    """The transport of one rank of :class:`~ppfunc.runtime.simulated.Simulated`. To be used by the thread of that rank."""

    def __init__(self, network: Network, wires: Wires, rank: int) -> None:
        self.rank, self.size, self._wires = rank, len(network.members), wires
        self._links = SimulatedLinks(network, rank)
        self._control = Control(self._links, lambda: wires.disconnect(rank))
        self._steps = 0

    # -- data ------------------------------------------------------------------------------

    def connect(self, links: Iterable[Link]) -> None:
        self._wires.connect(self.rank, sorted({link for link in links if self.rank in (link.sender, link.receiver)}))

    def post(self, rank: int, batch: Sequence[Transfer]) -> Call | None:
        return self._wires.post(rank, batch) if batch else None

    def wait_recv(self, rank: int, transfer: Transfer) -> Call | None:
        return self._wires.wait(rank, transfer)

    def wait_send(self, rank: int, transfer: Transfer) -> Call | None:
        return self._wires.wait(rank, transfer)

    # -- control ---------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        return self._control.generation

    def local_ranks(self, ranks: int) -> tuple[int, ...]:
        if ranks != self.size:
            raise ValueError(
                f"the schedule is for {ranks} ranks, the simulated network has {self.size}; "
                f"build the schedule with ranks={self.size}, or make a Simulated({ranks}, ...)"
            )
        return (self.rank,)

    def register_step(self) -> int:
        self._steps += 1
        return self._steps

    def all_gather(self, text: str) -> list[str]:
        return self._control.all_gather(text)

    def send_text(self, rank: int, peer: int, text: str) -> None:
        self._control.send_text(peer, text)

    def recv_text(self, rank: int, peer: int) -> str:
        return self._control.recv_text(peer)

    def begin(self, call: str, key: str | None, source: int) -> str:
        return self._control.begin(call, key, source)

    def end(self, losses: Mapping[int, torch.Tensor], parts: Mapping[int, LossPart], mode: Mode = "mixed") -> torch.Tensor | None:
        try:
            return self._control.end(losses, parts, mode)
        finally:
            self._links.settled()

    def fail(self, failure: Failure) -> BaseException:
        return self._control.fail(failure)

    def close(self) -> None:
        """Close the connections; peers that wait raise. Idempotent."""
        self._control.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
