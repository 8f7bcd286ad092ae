"""Carry tensors over a simulated network: messages as gloo does, in order on each route, once both ends have
posted; and sums and gathers among ranks.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from ppfunc.runtime.lowering.comparison import bits
from ppfunc.runtime.ports.protocols import Call, Collective, Route, Transfer, Wait
from ppfunc.runtime.values.buffers import Buffers
from ppfunc.stage import LeafSignature
from tests.network.network import Network, Pipe


def same_bits(one, other):
    """Tell whether two tensors of one dtype and device have the same shape and bits."""
    return one.shape == other.shape and torch.equal(bits(one), bits(other))


@dataclass(slots=True, eq=False)
class _End:
    """Holds one end of a message that has been posted.

    Args:
        tensors: those sent, or those received into.
        before: copies of those sent, as they were when they were posted.
        seconds: how long the message takes, at the sending end.
    """

    transfer: Transfer
    tensors: tuple[torch.Tensor, ...]
    before: tuple[torch.Tensor, ...] = ()
    seconds: float = 0.0
    arrived: bool = False
    error: RuntimeError | None = None


class Wires:
    """Carries tensors between all ranks of a simulation."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._open: set[tuple[int, int, Route]] = set()  # generation, rank, route
        self._posted: dict[tuple[Pipe, bool], deque[_End]] = defaultdict(deque)  # by pipe and direction

    def connect(self, rank: int, routes: Collection[Route]) -> None:
        """Open routes at the end of a rank, and wait for the other ends."""
        network, generation = self._network, self._network.members[rank].generation
        network.operation(rank, f"connect {len(routes)} routes")
        self._open |= {(generation, rank, route) for route in routes}
        for route in routes:
            self._await_open(rank, generation, route)

    def _await_open(self, rank: int, generation: int, route: Route) -> None:
        peer = route.receiver if route.sender == rank else route.sender
        name, pipe = f"the connection {_name(route)}", self._pipe(generation, route)
        self._network.wait(rank, peer, name, lambda: (generation, peer, route) in self._open, pipe)

    def post(self, rank: int, batch: Sequence[Transfer]) -> Call:
        """Make the call that posts a batch; it runs until the next failure."""
        generation = self._network.members[rank].generation
        routes = [_route(rank, transfer) for transfer in batch]
        for route in routes:
            self._require_open(rank, generation, route)
        text = "post " + ", ".join(f"{'send' if t.outgoing else 'recv'} {_name(t.tag)}" for t in batch)

        def post(buffers: Buffers) -> None:
            self._network.operation(rank, text)
            for transfer, route in zip(batch, routes, strict=True):
                self._require_open(rank, generation, route)
                end = (
                    self._sent(rank, transfer, buffers)
                    if transfer.outgoing
                    else _End(transfer, tuple(_poisoned(leaf, transfer.device) for leaf in transfer.leaves))
                )
                buffers.pending[transfer.tag] = end
                pipe = self._pipe(generation, route)
                sends, receives = self._posted[pipe, True], self._posted[pipe, False]
                (sends if end.transfer.outgoing else receives).append(end)
                while sends and receives:
                    source, destination = sends.popleft(), receives.popleft()
                    pipe.send(source.seconds, partial(self._deliver, source, destination))

        return post

    def wait(self, rank: int, transfer: Transfer) -> Call:
        """Make the call that waits for a message, posted at either end."""
        generation, route = self._network.members[rank].generation, _route(rank, transfer)
        tag, name = transfer.tag, f"message {_name(transfer.tag)}"
        text = f"wait_{'send' if transfer.outgoing else 'recv'} {_name(tag)}"

        def wait(buffers: Buffers) -> None:
            self._network.operation(rank, text)
            self._require_open(rank, generation, route)
            end: _End = buffers.pending[tag]
            self._network.wait(rank, transfer.peer, name, lambda: end.arrived, self._pipe(generation, route))
            del buffers.pending[tag]
            if end.error is not None:
                raise end.error
            if not transfer.outgoing:
                buffers.values[tag] = end.tensors

        return wait

    def disconnect(self, rank: int) -> None:
        """End the connections of a rank."""
        mine = {(generation, r, route) for generation, r, route in self._open if r == rank}
        self._open -= mine
        for generation, _, route in mine:
            self._pipe(generation, route).tear()

    def _require_open(self, rank: int, generation: int, route: Route) -> None:
        if (generation, rank, route) not in self._open or self._network.members[
            rank
        ].generation != generation:
            raise RuntimeError(
                f"got a message on {_name(route)}, which rank {rank} has not connected since the last failure"
            )

    def _pipe(self, generation: int, route: Route) -> Pipe:
        return self._network.pipe(generation, route.sender, route.receiver, f"data {route.direction}")

    def _sent(self, rank: int, transfer: Transfer, buffers: Buffers) -> _End:
        tensors = tuple(buffers.values.pop(transfer.tag))
        got, expected = [(tuple(t.shape), t.dtype) for t in tensors], _forms(transfer)
        if got != expected:
            raise RuntimeError(f"rank {rank} sends {got} as {_name(transfer.tag)}; agreed was {expected}")
        return _End(transfer, tensors, tuple(t.clone() for t in tensors), self._network.delay(rank))

    def _deliver(self, source: _End, destination: _End) -> None:
        sent, received = source.transfer, destination.transfer
        self._network.log(f"{_name(sent.tag)} arrives at rank {sent.peer}")
        source.arrived = destination.arrived = True
        if (sent.tag, _forms(sent)) != (received.tag, _forms(received)):
            told = (
                f"rank {received.peer} sends {_name(sent.tag)} {_forms(sent)} where rank {sent.peer} receives"
            )
            source.error = destination.error = RuntimeError(
                f"{told} {_name(received.tag)} {_forms(received)}"
            )
            return
        if not all(map(same_bits, source.tensors, source.before)):
            source.error = RuntimeError(
                f"rank {received.peer} has changed {_name(sent.tag)} before it was sent; wait for it first"
            )
        for tensor, copy in zip(source.tensors, destination.tensors, strict=True):
            copy.copy_(tensor)


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

    def all_to_all(
        self, sent: torch.Tensor, receives: Sequence[int], sends: Sequence[int]
    ) -> tuple[torch.Tensor, Wait]:
        return self._joined("all_to_all", sent.split(list(sends)), sum(receives))

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


def _poisoned(leaf: LeafSignature, device: torch.device) -> torch.Tensor:
    """Make a tensor with all bits set, which is NaN in every floating dtype."""
    tensor = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
    tensor.reshape(-1).view(torch.uint8).fill_(0xFF)
    return tensor


def _route(rank: int, transfer: Transfer) -> Route:
    ends = (rank, transfer.peer) if transfer.outgoing else (transfer.peer, rank)
    return Route(transfer.tag.direction, *ends)


def _forms(transfer: Transfer) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(leaf.shape), leaf.dtype) for leaf in transfer.leaves]


def _name(value: Sequence[object]) -> str:
    """Write a tag or a route in short: the direction, then the numbers.

    >>> _name(Route("F", 0, 1))
    'F/0/1'
    """
    return "/".join(map(str, value))
