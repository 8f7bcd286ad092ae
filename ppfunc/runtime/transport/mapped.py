"""Carry the messages of a route between two processes of one host, through memory that both map.

The memory is a file without a name, which the receiver opens through ``/proc`` of the sender, as it does two
pipes. One says where in the file each message lies, in the order in which they were sent; on the other, that
place goes back. Only the same user may open them, and they end with the processes. Pipes also order what both
read and write, wake a process that sleeps, and tell that the other has ended.
"""

import ctypes
import json
import mmap
import os
import secrets
import select
import struct
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any
from weakref import finalize, ref

import torch

from ..control.links import SocketLinks
from ..ports.protocols import aligned
from ..values.buffers import Leaves
from ..values.errors import LinkError

_CHANNEL = "map"
_SPINS = 20  # looks before sleeping, some 3 us each: who sleeps is woken some 30 us after the message
_SLEEP = 20  # milliseconds between looks whether a signal has come, or a rank has failed
_UNUSED = 1000  # messages that leave a slot free before its memory goes back: a warm step has fewer
_RECORD = struct.Struct("<QQ")
_MODES = os.O_RDWR, os.O_RDONLY, os.O_WRONLY  # of the file, of the places that come, of those that go back
_Slot = tuple[int, int]  # bytes, and their place in the file


def plain(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors whose memory is contiguous and has their values.

    That of a view may be conjugated or negated when it is read; a derivative that is zero may have none.
    """
    return [
        torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t)
        if t.is_neg() or t.is_conj() or t._is_zerotensor()
        else t
        for t in (tensor.contiguous() for tensor in tensors)
    ]


class _RouteEnd:
    """Holds one end of a route.

    Args:
        links: links of the transport.
        peer: rank at the other end.
        descriptors: descriptors of the file and of the ends of the pipes, closed with this object.
    """

    _memory: int
    _reads: int
    _writes: int

    def __init__(self, links: SocketLinks, peer: int, descriptors: list[int]) -> None:
        finalize(self, _close, descriptors)
        self._links, self._peer = links, peer
        self._map: Any = b""  # of the file, as it was when a slot first lay beyond the one before
        self._address = 0  # of the map
        self._unwritten: deque[_Slot] = deque()
        self._poll = select.poll()

    def _address_of(self, slot: _Slot) -> int:
        size, start = slot
        if start + size > len(self._map):
            with self._naming(start + size):
                self._map = mmap.mmap(self._memory, 0)
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        return self._address + start

    @contextmanager
    def _naming(self, size: int) -> Iterator[None]:
        """Name the route whose memory cannot be had."""
        try:
            yield
        except OSError as error:
            raise MemoryError(
                f"rank {self._links.rank} cannot map {size:,} bytes of shared memory for messages with rank"
                f" {self._peer} ({error.strerror}); free memory, or pass mapped=False to P2P on every rank"
            ) from error

    def _read(self) -> Iterable[Any]:
        """Read the slots that the peer has written, each at once: none is cut."""
        try:
            data = os.read(self._reads, 1 << 16)
        except BlockingIOError:
            return ()
        if not data:
            raise LinkError(self._peer, "gone")
        return _RECORD.iter_unpack(data)

    def _write(self, *slots: _Slot) -> bool | None:
        """Write slots, after the slots that are left.

        Returns:
            True, or None if the pipe is full."""
        self._unwritten.extend(slots)
        try:
            while self._unwritten:
                os.write(self._writes, _RECORD.pack(*self._unwritten[0]))
                self._unwritten.popleft()
        except BlockingIOError:
            return None
        except BrokenPipeError as error:
            raise LinkError(self._peer, "gone") from error
        return True

    def _pause(self) -> None:
        """Wait a little for the peer. Take in what all have sent, so that none waits with a full pipe."""
        self._poll.poll(_SLEEP)
        for end in self._links.receivers:
            if receiver := end():
                with suppress(LinkError):  # it may be one of before a failure
                    receiver.look()


class Sender(_RouteEnd):
    """Sends messages, each in the smallest free slot that holds it, or in a new slot.

    No slot has over four times the bytes of its message. There are as many as messages have been under way at
    a time, of about each size. Free ones are given up when a larger message needs a new one, and when 1 to 2
    times ``_UNUSED`` messages have not taken them.

    Attributes:
        offer: paths and names of what the receiver opens.
    """

    def __init__(self, links: SocketLinks, peer: int) -> None:
        made: list[int] = []
        super().__init__(links, peer, made)
        made.append(os.memfd_create(f"ppfunc-{secrets.token_hex(16)}"))
        for _ in range(2):
            made.extend(os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))
        self._made = made
        self._memory, arrives, self._writes, self._reads, goes_back = made
        paths = [f"/proc/{os.getpid()}/fd/{end}" for end in (self._memory, arrives, goes_back)]
        self.offer = [(path, os.readlink(path)) for path in paths]
        self._poll.register(self._writes, select.POLLOUT)
        self._free: list[_Slot] = []  # the smallest first
        self._old: set[_Slot] = set()  # those that have been free since ``_sent`` was last divisible
        self._size, self._sent = 0, count(1)  # of the file; messages

    def opened(self) -> None:
        """Close the receiver's ends of the pipes, which it has opened."""
        _close([self._made.pop(4), self._made.pop(1)])

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors of the host, as :func:`plain` returns them, as one message."""
        slot = self._slot(sum([aligned(tensor.nbytes) for tensor in tensors]))
        at = self._address_of(slot)
        for tensor in tensors:
            ctypes.memmove(at, tensor.data_ptr(), tensor.nbytes)
            at += aligned(tensor.nbytes)
        if not self._write(slot):
            self._links.wait_for(self._peer, self._write, pause=self._pause)

    def _slot(self, size: int) -> _Slot:
        step = max(mmap.ALLOCATIONGRANULARITY, 1 << max(0, size.bit_length() - 3))  # at most a quarter
        size = max(1, -(-size // step)) * step
        if next(self._sent) % _UNUSED == 0:
            self._release(self._old.intersection(self._free))
            self._old = set(self._free)
        if (slot := self._free_slot(size)) is None:
            for freed in self._read():  # by the receiver; it takes longer than to send a small message
                insort(self._free, freed)
            slot = self._free_slot(size)
        if slot is not None:
            return slot
        self._release([slot for slot in self._free if slot[0] < size])
        with self._naming(size):
            os.posix_fallocate(self._memory, self._size, size)
        self._size += size
        return size, self._size - size

    def _free_slot(self, size: int) -> _Slot | None:
        at = bisect_left(self._free, (size, 0))
        if at == len(self._free) or self._free[at][0] > 4 * size:
            return None
        self._old.discard(self._free[at])
        return self._free.pop(at)

    def _release(self, slots: Collection[_Slot]) -> None:
        """Give the memory of free slots to the system."""
        for size, start in slots:
            self._map.madvise(mmap.MADV_REMOVE, start, size)
        self._free = [slot for slot in self._free if slot not in slots]


class Receiver(_RouteEnd):
    """Receives messages in the order in which they were sent, whichever is waited for first."""

    def __init__(self, links: SocketLinks, peer: int, descriptors: list[int]) -> None:
        super().__init__(links, peer, descriptors)
        self._memory, self._reads, self._writes = descriptors
        self._poll.register(self._reads, select.POLLIN)
        self._expected, self._numbers = count(), count()
        self._arrived: dict[int, _Slot] = {}  # by number
        links.receivers = (*(end for end in links.receivers if end()), ref(self))

    def expect(self) -> int:
        """Return the number of the next message that is not expected yet."""
        return next(self._expected)

    def take(self, number: int, forms: Iterable[tuple[Sequence[int], torch.dtype]]) -> Leaves:
        """Wait for a message, and return its tensors, of these shapes and dtypes."""
        slot = self._arrival(number) or self._links.wait_for(
            self._peer, partial(self._arrival, number), pause=self._pause, spins=_SPINS
        )
        at, tensors = self._address_of(slot), []
        for shape, dtype in forms:
            tensors.append(tensor := torch.empty(shape, dtype=dtype, device="cpu"))
            ctypes.memmove(tensor.data_ptr(), at, tensor.nbytes)
            at += aligned(tensor.nbytes)
        with suppress(LinkError):  # what has arrived counts
            self._write(slot)
        return tuple(tensors)

    def look(self) -> None:
        """Take in where the messages lie that have arrived."""
        self._arrived |= {n: slot for slot, n in zip(self._read(), self._numbers, strict=False)}

    def _arrival(self, number: int) -> _Slot | None:
        if number not in self._arrived:
            self.look()
        return self._arrived.pop(number, None)


def open_mapped(
    links: SocketLinks, name: str, members: Sequence[int], wanted: bool
) -> Sender | Receiver | None:
    """Open this rank's end of the route from the first of two ranks to the second, which both call this.

    None at both ends where one does not want it, or the second cannot open what the first has made.

    Args:
        links: carry what they tell each other.
        name: name of the route, the same at both.

    Raises:
        LinkError: a rank has failed, is gone or late.
    """
    first, second = members
    if links.rank == second:
        return _accept(links, name, first, wanted)
    sender = None
    with suppress(OSError):
        sender = Sender(links, second) if wanted and hasattr(os, "memfd_create") else None
    links.send(second, _CHANNEL, json.dumps([name, sender and sender.offer]).encode())
    if not json.loads(links.recv(second, _CHANNEL)) or sender is None:
        return None
    sender.opened()
    return sender


def _accept(links: SocketLinks, name: str, sender: int, wanted: bool) -> Receiver | None:
    theirs, offer = json.loads(links.recv(sender, _CHANNEL))
    assert theirs == name, (theirs, name)
    opened: list[int] = []
    with suppress(OSError):  # it runs where this process does not see it, or as another user
        for (path, called), mode in zip(offer if wanted and offer else (), _MODES, strict=False):
            if os.readlink(path) == called:  # else, another process has its number here
                opened.append(os.open(path, mode | os.O_NONBLOCK))
    receiver = None
    if len(opened) == len(_MODES):
        receiver = Receiver(links, sender, opened)
    else:
        _close(opened)
    links.send(sender, _CHANNEL, json.dumps(receiver is not None).encode())
    return receiver


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
