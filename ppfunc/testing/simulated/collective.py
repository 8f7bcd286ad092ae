"""Sum and gather over ranks of a simulated network, as the transports of processes do over communicators."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch

from ppfunc.runtime.transport.collective import Collective, Wait

from .network import Network


class SimulatedCollective(Collective):
    """Exchanges tensors among some ranks; each sends one to every other.

    Args:
        network: that carries them.
        rank: this one.
        members: all of them, ascending.
    """

    def __init__(self, network: Network, rank: int, members: tuple[int, ...]) -> None:
        super().__init__(len(members), members.index(rank))
        self._network, self._rank, self._members = network, rank, members
        self._generation = -1

    def all_reduce(self, tensor: torch.Tensor, op: Literal["sum", "max"] = "sum") -> Wait:
        receive = self._exchange("all_reduce", [tensor] * self.size)

        def wait() -> None:
            parts = torch.stack(receive())
            tensor.copy_(parts.sum(0) if op == "sum" else parts.amax(0))

        return wait

    def all_gather(self, part: torch.Tensor) -> tuple[torch.Tensor, Wait]:
        return self._joined("all_gather", [part] * self.size, part.numel() * self.size)

    def all_to_all(self, sent: torch.Tensor, receives: Sequence[int]) -> tuple[torch.Tensor, Wait]:
        return self._joined("all_to_all", sent.chunk(self.size), sum(receives))

    def _joined(self, name: str, parts: Sequence[torch.Tensor], length: int) -> tuple[torch.Tensor, Wait]:
        """Exchange flat tensors, and join what arrives."""
        whole, receive = parts[0].new_empty(length), self._exchange(name, parts)

        def wait() -> None:
            torch.cat(receive(), out=whole)

        return whole, wait

    def _exchange(self, name: str, parts: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Send one tensor to each rank; the call waits for those of all ranks, and returns them in order."""
        network, rank, members = self._network, self._rank, self._members
        network.operation(rank, name)
        if self._generation != network.members[rank].generation:
            self._generation, self._begun = network.members[rank].generation, 0
        self._begun += 1
        generation, number = self._generation, self._begun
        mine = network.exchanged[generation, members, number, rank]
        for peer, part in zip(members, parts, strict=True):
            theirs = network.exchanged[generation, members, number, peer]
            arrive = partial(theirs.update, {rank: part.clone()})
            if peer == rank:
                arrive()
            else:
                network.pipe(generation, rank, peer, "sum").send(network.delay(rank), arrive)

        def receive() -> list[torch.Tensor]:
            network.operation(rank, f"wait {name}")
            for peer in members:
                if peer != rank:
                    pipe = network.pipe(generation, peer, rank, "sum")
                    network.wait(rank, peer, "a sum", partial(mine.__contains__, peer), pipe)
            del network.exchanged[generation, members, number, rank]
            return [mine[peer] for peer in members]

        return receive
