"""Sum over all ranks of a simulated network, as the transports of processes do over their communicators."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch

from ..collective import Collective, Wait
from .network import Network


class SimulatedCollective(Collective):
    """Sums among all ranks; each sends its tensor to every other one."""

    def __init__(self, network: Network, rank: int) -> None:
        super().__init__(len(network.members), rank)
        self._network = network
        self._generation = -1

    def all_reduce(self, tensor: torch.Tensor, op: Literal["sum", "max"] = "sum") -> Wait:
        network, rank = self._network, self.index
        network.operation(rank, "all_reduce")
        if self._generation != network.members[rank].generation:
            self._generation, self._begun = network.members[rank].generation, 0
        self._begun += 1
        generation, number = self._generation, self._begun
        mine = network.sums[generation, number, rank]
        mine[rank] = tensor.clone()
        for peer in (peer for peer in range(self.size) if peer != rank):
            theirs, copy = network.sums[generation, number, peer], tensor.clone()
            pipe = network.pipe(generation, rank, peer, "sum")
            pipe.send(network.delay(rank), partial(theirs.update, {rank: copy}))

        def wait() -> None:
            network.operation(rank, "wait all_reduce")
            for peer in (peer for peer in range(self.size) if peer != rank):
                pipe = network.pipe(generation, peer, rank, "sum")
                network.wait(rank, peer, "a sum", partial(mine.__contains__, peer), pipe)
            parts = torch.stack([part for _, part in sorted(network.sums.pop((generation, number, rank)).items())])
            tensor.copy_(parts.sum(0) if op == "sum" else parts.amax(0))

        return wait
