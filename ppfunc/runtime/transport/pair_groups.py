"""Carry tensors between pairs of ranks, each way on communicators of its own, and open communicators.

These open in threads, so that a rank that fails, or a frozen store, holds up no other.
"""

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ppfunc.stage.device import unique_name

from ..control.connections import in_thread
from ..control.links import Rendezvous, SocketLinks, give_way
from ..ports import _torch
from ..ports.protocols import Call, Route, Transfer, joining
from ..values.buffers import Buffers
from ..values.errors import LinkError
from .mapped import Receiver, Sender, open_mapped, plain

# Dtypes that every backend can carry; anything else travels as its bytes.
_PLAIN = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
}
_CHANNEL = "open"
_LATER = 30.0  # seconds
_LOST = (
    "Connection closed",
    "Connection reset",
    "Broken pipe",
    "Connection refused",
    "aborted",
)  # in messages of backends


class Opening(NamedTuple):
    """Describe a communicator to open.

    Args:
        name: the same at all members, taken anew after each failure.
        members: ranks, in the same order at all of them.
        messages: whether it carries messages from the first of two members to the second, and nothing else;
            else, sums and gathers.
        mapped: whether these messages may go through memory that both map.
    """

    name: str
    members: Sequence[int]
    messages: bool = False
    mapped: bool = False


class _PairGroup:
    """Holds the communicator of a route, whose sender is its rank 0.

    ``group`` is None until it is connected, and again after a failure.
    """

    group: Any = None


class PairGroups:
    """Owns the communicators of this rank with others, and knows the messages under way on them.

    Args:
        rendezvous, links: rendezvous and links of the transport.
        line: the ranks of the pipeline.
        mapped: whether messages take memory, as of :class:`P2P`.
    """

    def __init__(self, rendezvous: Rendezvous, links: SocketLinks, line: Sequence[int], mapped: bool) -> None:
        self._links, self._line, self._mapped = links, line, mapped
        self._rank, self._backend = line.index(links.rank), rendezvous.backend
        self._carried, self._queued = rendezvous.carried, rendezvous.queued
        self._pairs: dict[str, _PairGroup] = {}
        # That of the buffers of the running step. Messages through mapped memory have numbers.
        self._pending: dict[Any, _torch.UnderWay | int] = {}
        self.device: torch.device | None = None  # of what is connected

    def let_go(self) -> list[_torch.UnderWay]:
        """Forget all communicators and mapped memory; return the operations under way on communicators."""
        under_way = [each for each in self._pending.values() if not isinstance(each, int)]
        self._pending.clear()
        self.device = None
        for pair in self._pairs.values():
            pair.group = None
        return under_way

    def unconnected(self, routes: Iterable[Route]) -> Iterator[tuple[_PairGroup, Opening]]:
        """List the communicators of these routes that are not open."""
        wanted: dict[str, Opening] = {}
        # In one order on all ranks, so that nobody waits in a circle; every other pair of a chain at the same
        # time.
        for route in sorted(routes, key=lambda route: (min(route.sender, route.receiver) % 2, route)):
            if self._rank in (route.sender, route.receiver) and route.sender != route.receiver:
                members = self._line[route.sender], self._line[route.receiver]
                name = self._name(route)
                wanted.setdefault(name, Opening(name, members, True, self._mapped))
        for name, opening in wanted.items():
            pair = self._pairs.setdefault(name, _PairGroup())
            if pair.group is None:
                yield pair, opening

    def require_carried(self, device: torch.device, place: str) -> None:
        """Raise ValueError for a device whose tensors are not carried.

        Args:
            place: user of the device, for the error.
        """
        if device.type != self._carried:
            other = next(
                (name for name, kind in _torch.CARRIES.items() if kind == device.type), "another backend"
            )
            raise ValueError(
                f"{place}, whose tensors the backend {self._backend!r} of its process group does not carry;"
                f" move its parameters to a device of type {self._carried!r}, or give P2P a group of"
                f" {other!r}, such as torch.distributed.new_group(backend={other!r})"
            )
        if self.device not in (None, device):
            raise ValueError(
                f"{place}, and the communicators of the rank are on {self.device}; move all parameters of"
                f" the rank to {self.device}, or make a new P2P() on every rank"
            )

    def require_own_device(self, device: torch.device, gather: Callable[[str], dict[int, str]]) -> None:
        """Raise ValueError on all ranks where two compute on one device, which NCCL does not take.

        As NCCL does, it takes ranks of different ``NCCL_HOSTID`` for those of different hosts.

        Args:
            gather: gathers texts of all ranks, which all call.
        """
        name = unique_name(device)
        names = gather(json.dumps(name and [os.environ.get("NCCL_HOSTID"), name]))
        first: dict[str, int] = {}
        for rank, name in sorted(names.items()):
            if name != "null" and first.setdefault(name, rank) != rank:
                raise ValueError(
                    f"ranks {first[name]} and {rank} compute on one device ({json.loads(name)[1]}), expected"
                    " one for each under NCCL; move the parameters of each rank to a device of its own, or"
                    " give P2P a group of 'gloo' and compute on the CPU"
                )

    def _name(self, route: Route) -> str:
        """Return the name of the communicator of a route, the same at both ends."""
        way = f"{self._line[route.sender]}-{self._line[route.receiver]}"
        # NCCL takes the messages of one way in order; those of both ways in one batch would wait for each
        # other, each send for a receive.
        return way if self._queued else f"{route.direction}/{way}"

    def _pair(self, transfer: Transfer) -> _PairGroup:
        ends = (self._rank, transfer.peer) if transfer.outgoing else (transfer.peer, self._rank)
        return self._pairs[self._name(Route(transfer.tag.direction, *ends))]

    def post(self, batch: Sequence[Transfer]) -> Call:
        for device in {transfer.device for transfer in batch}:
            self.require_carried(device, f"a stage of rank {self._rank} computes on the device {device}")
        yielding = False
        if self._queued:
            by_way: dict[tuple[int, bool], list[Transfer]] = {}
            for transfer in batch:
                by_way.setdefault((transfer.peer, transfer.outgoing), []).append(transfer)
            calls = [self._coalesced(part) for part in by_way.values()]
        else:
            # Receives first: a send may wait for a peer that sends at the same time.
            ends = sorted(batch, key=lambda each: each.outgoing)
            calls = [self._mapped_end(t) if self._is_mapped(t) else self._end(t) for t in ends]
            yielding = any(t.outgoing and not self._is_mapped(t) for t in batch)

        def post_all(buffers: Buffers) -> None:
            # Its receive is to be posted before a send, which takes another round trip otherwise.
            if yielding:
                give_way()
            for call in calls:
                call(buffers)
            if yielding:  # to take in what it delivers
                give_way()

        return calls[0] if len(calls) == 1 and not yielding else post_all

    def _is_mapped(self, transfer: Transfer) -> bool:
        """Tell whether a message goes through mapped memory, until its route is opened again."""
        return isinstance(self._pair(transfer).group, Sender | Receiver)

    def _mapped_end(self, transfer: Transfer) -> Call:
        """Make the call that sends or expects a message through mapped memory."""
        pair, tag = self._pair(transfer), transfer.tag

        def send(buffers: Buffers) -> None:
            pair.group.send(plain(buffers.values.pop(tag)))

        def expect(buffers: Buffers) -> None:
            buffers.pending[tag] = pair.group.expect()

        return send if transfer.outgoing else expect

    def _coalesced(self, batch: list[Transfer]) -> Call:
        """Post the messages of a communicator as one operation.

        The tensors are there before: a full GPU may hold up what makes them, longer than an abort waits.
        """
        pair, ends = self._pair(batch[0]), [self._prepared(transfer) for transfer in batch]

        def post_coalesced(buffers: Buffers) -> None:
            posts = [prepare(buffers) for prepare in ends]
            with _torch.coalesced(pair.group) as works:
                for post in posts:
                    post(works)

        return post_coalesced

    def _end(self, transfer: Transfer) -> Call:
        prepare = self._prepared(transfer)
        return lambda buffers: prepare(buffers)([])

    def _prepared(self, transfer: Transfer) -> Callable[[Buffers], Callable[[list[Any]], None]]:
        """Make the call that makes the tensors of an end of a message, and returns the call that posts them.

        The latter adds its works to a list.
        """
        pair, wire, rank = self._pair(transfer), _wire(transfer), self._line[transfer.peer]
        outgoing, tag, _, leaves, device = transfer
        forms = [(leaf.shape, leaf.dtype) for leaf in leaves]
        # In a queue the messages of a batch are one operation.
        join = None if self._queued else joining(transfer)

        def prepare(buffers: Buffers) -> Callable[[list[Any]], None]:
            if outgoing:
                tensors = plain(buffers.values.pop(tag))
            else:
                tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in forms]
            posted = wire(tensors if join is None else join(tensors))

            def post(works: list[Any]) -> None:
                self._pending, group = buffers.pending, pair.group
                buffers.pending[tag] = works, posted if outgoing else tensors
                begun = (group.send([t], 1, 0) if outgoing else group.recv([t], 0, 0) for t in posted)
                try:
                    works.extend(filter(None, begun))  # none yet for what is coalesced
                except RuntimeError as error:
                    raise lost(rank, error) from error

            return post

        return prepare

    def wait(self, transfer: Transfer) -> Call | None:
        """Make the call that waits for a posted transfer, if there is anything to wait for."""
        outgoing, tag, peer, links = transfer.outgoing, transfer.tag, self._line[transfer.peer], self._links
        pair, forms = self._pair(transfer), [(leaf.shape, leaf.dtype) for leaf in transfer.leaves]

        def take(buffers: Buffers) -> None:
            buffers.values[tag] = pair.group.take(buffers.pending.pop(tag), forms)

        if self._is_mapped(transfer):
            return None if outgoing else take

        def finish(buffers: Buffers) -> None:
            works, tensors = buffers.pending.pop(tag)
            links.waiting_on = peer
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise lost(peer, error) from error
            links.waiting_on = None
            if not outgoing:
                buffers.values[tag] = tuple(tensors)

        return finish


def lost(peer: int, error: BaseException) -> BaseException:
    """Translate a backend's error into a LinkError of the peer, or return it if it names no link."""
    text = str(error) if isinstance(error, RuntimeError) else ""
    if "Timed out waiting" in text:
        return LinkError(peer, "late", f"it has not answered in time ({text.splitlines()[0]})")
    if isinstance(error, dist.DistNetworkError) or any(words in text for words in _LOST):
        return LinkError(peer, "gone")
    return error


def _wire(transfer: Transfer) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """Make the map of a transfer's tensors to the tensors that travel: bytes for dtypes that backends may not
    know.
    """
    if all(leaf.dtype in _PLAIN and 0 not in leaf.shape for leaf in transfer.leaves):
        return lambda tensors: tensors
    return lambda tensors: [t if t.dtype in _PLAIN else _as_bytes(t) for t in tensors if t.numel()]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(-1).view(torch.uint8)


# -- opening communicators


class _Addresses(Store):
    """Serves as the store of a gloo communicator, which leaves its address here and waits for others."""

    def __init__(self) -> None:
        super().__init__()
        self.mine: Future[tuple[str, bytes]] = Future()  # its key and its address
        self._known, self._complete = dict[str, bytes](), threading.Event()
        self._given_up = False

    def set(self, key: str, value: Any) -> None:
        self._known[key] = bytes(value)
        self.mine.set_result((key, bytes(value)))

    def wait(self, keys: Sequence[str], timeout: object = None) -> None:
        self._complete.wait()
        if self._given_up:
            raise ConnectionError("a rank has failed")

    def get(self, key: str) -> bytes:
        return self._known[key]

    def has_extended_api(self) -> bool:
        return False

    def complete(self, theirs: dict[str, bytes] | None) -> None:
        """Add the addresses of all peers and wake the threads that wait; without addresses, by an error."""
        self._given_up = theirs is None
        self._known |= theirs or {}
        self._complete.set()


def open_groups(
    rendezvous: Rendezvous,
    links: SocketLinks,
    wanted: Sequence[Opening],
    device: torch.device,
    begun: list[Any],
) -> Iterator[Any]:
    """Open communicators under the backend of the user's group; yield each in its turn.

    Under gloo, messages between two processes of a host go through memory that both map.

    Args:
        rendezvous, links: rendezvous and links of the transport.
        wanted: communicators of this rank, in an order in which no ranks wait in a circle.
        device: device of the tensors of this rank.
        begun: a list to which each communicator is added; under NCCL before it connects, so that it can be
            aborted.

    Raises:
        LinkError: a rank has failed, is gone or late.
        RuntimeError: the backend has failed to connect.
    """
    links.check()
    wanted = [one._replace(name=f"{links.generation}/{one.name}") for one in wanted]
    if rendezvous.queued:
        yield from open_nccl(rendezvous, links, wanted, device, begun)
        return
    for one in wanted:
        group = open_mapped(links, one.name, one.members, one.mapped) if one.messages else None
        if group is None and rendezvous.backend != "gloo":
            peer = one.members[(one.members.index(links.rank) + 1) % len(one.members)]
            make = partial(_make, rendezvous, one, rendezvous.timeout)
            group = links.settle(peer, in_thread(make, "opens"))
        begun.append(group or open_gloo(links, one.name, one.members, rendezvous.timeout))
        yield begun[-1]


def _make(rendezvous: Rendezvous, one: Opening, seconds: float) -> Any:
    """Make a communicator of a backend other than gloo, whose members meet in the store of the group."""
    ranks, limit = [rendezvous.ranks[member] for member in one.members], timedelta(seconds=seconds)
    store, place = PrefixStore(one.name, rendezvous.store), one.members.index(rendezvous.rank)
    return _torch.communicator(rendezvous.backend, f"ppfunc/{one.name}", store, ranks, place, limit)


def open_nccl(
    rendezvous: Rendezvous,
    links: SocketLinks,
    wanted: Sequence[Opening],
    device: torch.device,
    begun: list[Any],
) -> Iterator[Any]:
    """Open communicators of NCCL, or of another backend that queues its operations on a device: their members
    begin all of them side by side, and then connect them in order.

    While one begins, no kernel may wait for a peer: it would hold up what allocates memory.
    """
    places = [one.members.index(links.rank) for one in wanted]
    limit = 2 * rendezvous.timeout + _LATER  # who is late is found first
    dials: list[tuple[int, Future[Any]]] = []
    for one, place in zip(wanted, places, strict=True):

        def begin(one: Opening = one) -> Any:
            group = _make(rendezvous, one, limit)
            begun.append(group)
            _torch.begin_nccl(group, device)
            return group

        dials.append((one.members[(place + 1) % len(one.members)], in_thread(begin, "opens")))
    groups = [links.settle(peer, dial) for peer, dial in dials]
    for one, place, group, (peer, _) in zip(wanted, places, groups, dials, strict=True):
        connect = partial(_torch.connect_nccl, group, place, len(one.members), device, one.messages)
        links.settle(peer, in_thread(connect, "connects"))
        yield group


def open_gloo(links: SocketLinks, name: str, members: Sequence[int], timeout: float) -> Any:
    """Open a gloo communicator of some ranks, in the order given, which all come to the same call.

    gloo cannot be interrupted while it connects, and asks an address for minutes whose process has ended: it
    connects in a thread, which is left alone where a rank fails.

    Args:
        links: carry the addresses.
        name: name of the communicator, the same at all members.
        timeout: seconds for connecting, and then for each operation.

    Raises:
        LinkError: a rank has failed, is gone or late.
        RuntimeError: gloo has failed to connect.
    """
    place, others = members.index(links.rank), [member for member in members if member != links.rank]
    peer = members[(place + 1) % len(members)]
    addresses, limit = _Addresses(), timedelta(seconds=timeout)

    def opened(group: Future[Any]) -> None:
        if not addresses.mine.done():  # it has failed before, as for lack of descriptors
            addresses.mine.set_exception(group.exception())

    group = in_thread(lambda: _torch.ProcessGroupGloo(addresses, place, len(members), limit), "opens")
    group.add_done_callback(opened)
    try:
        key, address = links.settle(peer, addresses.mine)
        for other in others:
            links.send(other, _CHANNEL, json.dumps([name, key, address.hex()]).encode())
        addresses.complete(dict(receive_address(links, name, other) for other in others))
        return links.settle(peer, group)
    finally:
        addresses.complete(None)


def receive_address(links: SocketLinks, name: str, peer: int) -> tuple[str, bytes]:
    """Return the address that a peer has sent for this communicator."""
    theirs, key, address = json.loads(links.recv(peer, _CHANNEL))
    assert theirs == name, (theirs, name)
    return key, bytes.fromhex(address)
