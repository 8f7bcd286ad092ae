"""Open a transport over processes: pair up its ranks, refuse wrong arguments, open its communicators.

These open in threads, so that a rank that fails, or a frozen store, holds up no other.
"""

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from ppfunc._checks import require_type

from ..control.connections import in_thread
from ..control.rendezvous import Rendezvous
from ..control.socket_links import SocketLinks
from ..ports import _torch
from ..ports.protocols import Axes, ShardWhat, require_shardable
from .mapped import open_mapped

_CHANNEL = "open"
_LATER = 30.0  # seconds


def pair_up(group: Any, timeout: float | None, mesh: DeviceMesh | None) -> Rendezvous | None:
    """Pair up this call with those of the other ranks; None if it cannot be known which these are.

    Each call of a rank counts, also one that is refused: else later ones would not meet.
    """
    if not dist.is_available() or not dist.is_initialized() or group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    ranks = mesh.mesh.flatten().tolist() if isinstance(mesh, DeviceMesh) else None
    if ranks is not None and dist.get_rank() not in ranks:
        return None
    shared: Any = group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD
    if lacking := _torch.lacking(shared):
        raise ValueError(
            f"P2P got a process group with the backend {_torch.backend_of(shared)!r}, which lacks {lacking};"
            " make one with torch.distributed.new_group(backend='gloo') and give it as P2P(group), or lower a"
            " trainer over 'fake' by OnPaper(mesh=mesh, axes=axes)"
        )
    return Rendezvous("ppfunc/transports", shared, timeout if _is_limit(timeout) else None, ranks)


def _is_limit(timeout: object) -> bool:
    """Tell whether this is a limit of time: None, or seconds that a lock can wait."""
    return timeout is None or (
        isinstance(timeout, int | float)
        and not isinstance(timeout, bool)
        and 0 < timeout <= threading.TIMEOUT_MAX
    )


def require_group(
    group: dist.ProcessGroup | None,
    timeout: float | None,
    mesh: DeviceMesh | None,
    axes: Axes | None,
    shard: ShardWhat,
) -> None:
    """Raise where these arguments of :class:`P2P` are wrong, or do not go together."""
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER if dist.is_available() else None  # a number, or a group
    wanted = (
        (
            "group",
            None if group is outside else group,
            dist.ProcessGroup,
            "a group, or none after init_process_group(backend) of torch; P2P(mesh=mesh) takes a mesh",
        ),
        ("mesh", mesh, DeviceMesh, "a DeviceMesh, such as torch's init_device_mesh makes"),
        ("axes", axes, Axes, "ppfunc.Axes('pp', data='dp')"),
    )
    for name, value, kind, expected in wanted:
        require_type(name, value, kind | None, expected)
    if not _is_limit(timeout):
        raise ValueError(
            f"timeout: got {timeout!r}, expected seconds, more than 0 and at most {threading.TIMEOUT_MAX:g}"
        )
    if group is not None and mesh is not None:
        raise ValueError(
            "P2P got a process group and a mesh; expected P2P(group), or P2P(mesh=mesh, axes=axes)"
        )
    if axes is not None and mesh is None:
        raise ValueError(f"axes: got {axes}, and no mesh that has them; give mesh= as well")
    require_shardable(axes, shard)
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "P2P got no process group; call torch.distributed.init_process_group first, or use InProcess()"
        )
    if group is outside or (mesh is not None and dist.get_rank() not in mesh.mesh):
        what = "process group" if mesh is None else "mesh"
        raise RuntimeError(
            f"P2P got a {what} of which this process is not a member; call it on its ranks only"
        )


# -- communicators


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
        """Add the addresses of the others, and wake those that wait for them; with None, by an error."""
        self._given_up = theirs is None
        self._known |= theirs or {}
        self._complete.set()


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
        rendezvous, links: of the transport.
        wanted: those of this rank, in an order in which no ranks wait in a circle.
        device: where the tensors of this rank are.
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
    return _torch.communicator(rendezvous.backend, store, ranks, place, limit)


def open_nccl(
    rendezvous: Rendezvous,
    links: SocketLinks,
    wanted: Sequence[Opening],
    device: torch.device,
    begun: list[Any],
) -> Iterator[Any]:
    """Open communicators of NCCL, or of another backend that queues its operations on a device, which their
    members begin side by side and then connect one after the other.

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
        name: of the communicator, the same at all members.
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
