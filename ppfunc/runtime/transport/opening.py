"""Open communicators in threads, so that a rank that fails, or a frozen store, holds up no other."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from ppfunc.stage.interrupts import act_on_interrupts

from ..control.rendezvous import Rendezvous
from ..control.socket_links import SocketLinks
from ..errors import LinkError
from . import _torch

_CHANNEL = "open"
_PAUSE = 0.05  # seconds between looks whether a rank has failed


class _Addresses(Store):
    """The store of one gloo communicator: gloo leaves an address in it, and waits for those of the others."""

    def __init__(self, left: Callable[[tuple[str, Any]], None]) -> None:
        super().__init__()
        self._left, self._known, self._complete = left, dict[str, bytes](), threading.Event()
        self._given_up = False

    def set(self, key: str, value: Any) -> None:
        self._known[key] = bytes(value)
        self._left(("address", (key, bytes(value))))

    def wait(self, keys: Sequence[str], timeout: object = None) -> None:
        self._complete.wait()
        if self._given_up:
            raise ConnectionError("a rank has failed")

    def get(self, key: str) -> bytes:
        return self._known[key]

    def has_extended_api(self) -> bool:
        return False

    def complete(self, theirs: dict[str, bytes]) -> None:
        """Give the addresses of the others."""
        self._known |= theirs
        self._complete.set()

    def give_up(self) -> None:
        """Unblock waiters with an error and drop the callback, so that a group completed later is freed."""
        self._given_up = True
        self._left = lambda event: None
        self._complete.set()


def open_group(
    rendezvous: Rendezvous,
    links: SocketLinks,
    name: str,
    members: Sequence[int],
    device: torch.device,
    messages: bool = False,
) -> Any:
    """Open a communicator of some ranks, under the backend of the user's group.

    Args:
        name: the same at all members, which is taken anew after each failure.
        members: in the same order at all of them.
        device: where the tensors of this rank are.
        messages: whether it carries messages from the first of two members to the second, and nothing else;
            else, sums and gathers.
    """
    links.check()
    name = f"{links.generation}/{name}"
    if rendezvous.backend == "nccl":
        return open_nccl(rendezvous, links, name, members, device, messages)
    return open_gloo(links, name, members, rendezvous.timeout)


def open_nccl(
    rendezvous: Rendezvous,
    links: SocketLinks,
    name: str,
    members: Sequence[int],
    device: torch.device,
    messages: bool,
) -> Any:
    """Open an NCCL communicator of some ranks, in the order given, which all come to the same call.

    Args:
        rendezvous: makes it, over the store.
        links: know which ranks live.
        name: of the communicator, the same at all members.
        device, messages: as of :func:`open_group`.

    Raises:
        LinkError: a rank has failed, is gone or late.
        RuntimeError: NCCL has failed to connect.
    """
    place, size = members.index(links.rank), len(members)
    events: SimpleQueue[tuple[str, Any]] = SimpleQueue()
    begun: list[Any] = []

    def make() -> Any:
        begun.append(rendezvous.open_nccl(name, place, size))
        _torch.connect_nccl(begun[0], place, size, device, messages)
        return begun[0]

    _make_in_thread(make, place, events.put)
    links.waiting_on = members[(place + 1) % size]
    try:
        group = _await(links, events, links.waiting_on, rendezvous.timeout)
    except BaseException:
        _torch.Aborts().begin(begun)  # nobody else knows it
        raise
    links.waiting_on = None
    return group


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
    events: SimpleQueue[tuple[str, Any]] = SimpleQueue()
    addresses, limit = _Addresses(events.put), timedelta(seconds=timeout)
    _make_in_thread(lambda: _torch.ProcessGroupGloo(addresses, place, len(members), limit), place, events.put)
    try:
        links.waiting_on = members[(place + 1) % len(members)]
        key, address = _await(links, events, links.waiting_on, timeout)
        for other in others:
            links.send(other, _CHANNEL, json.dumps([name, key, address.hex()]).encode())
        addresses.complete(dict(_address(links, name, other) for other in others))
        links.waiting_on = members[(place + 1) % len(members)]
        group = _await(links, events, links.waiting_on, timeout)
        links.waiting_on = None
        return group
    finally:
        addresses.give_up()


def _make_in_thread(make: Callable[[], Any], place: int, tell: Callable[[tuple[str, Any]], None]) -> None:
    """Begin to make a communicator in a thread, which tells ``("made", group)`` or ``("failed", error)``."""

    def run() -> None:
        try:
            tell(("made", make()))
        except Exception as error:
            tell(("failed", error))

    threading.Thread(target=run, name=f"ppfunc rank {place} connects", daemon=True).start()


def _await(links: SocketLinks, events: SimpleQueue[tuple[str, Any]], peer: int, timeout: float) -> Any:
    """Wait for the next event of the thread."""
    end = time.monotonic() + timeout
    while True:
        try:
            act_on_interrupts()
            kind, what = events.get(timeout=_PAUSE)
        except Empty:
            links.check()
            if time.monotonic() > end:
                raise LinkError(
                    peer,
                    "late",
                    f"rank {links.rank} waited for rank {peer}, which has not connected in {timeout:g} s",
                ) from None
            continue
        if kind == "failed":
            raise what
        return what


def _address(links: SocketLinks, name: str, peer: int) -> tuple[str, bytes]:
    """Return the address that a peer has sent for this communicator."""
    theirs, key, address = json.loads(links.recv(peer, _CHANNEL))
    assert theirs == name, (theirs, name)
    return key, bytes.fromhex(address)
