"""Device memory: NaN at first, poisoned when another allocation may have it.

As the caching allocator of torch has it, a block belongs to the stream that was current when it was
allocated, and once freed may be handed out again there, at once. Each allocation has memory of its own here,
so what reads a block after that finds NaN rather than other numbers. Freed blocks are looked at when the
next one is allocated, by whichever stream: what happens to follow soon enough on the right one is no
protection.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import Any

import torch

from . import guard
from .clocks import Accesses, Region

aten = torch.ops.aten


class Block:
    """Memory of one allocation."""

    def __init__(self, size: int, stream: Any, serial: int) -> None:
        self.size, self.stream, self.serial = size, stream, serial
        self.bytes = torch.empty(-(-max(size, 1) // 64) * 64, dtype=torch.uint8, device="cpu")
        self.accesses = Accesses()
        self.recorded: set[Any] = set()  # streams
        self.poison()

    def poison(self) -> None:
        self.bytes.fill_(255)  # NaN in every floating dtype

    def whole(self) -> Region:
        return Region(self, 0, self.size, (self.size,), (1,), 1)

    def __repr__(self) -> str:
        return f"block {self.serial} ({self.size} bytes, of {self.stream})"


class Pinned:
    """Pinned memory of the host, for the accesses of copies to and from it."""

    def __init__(self, size: int, number: int) -> None:
        self.size, self.number, self.accesses = size, number, Accesses()

    def __repr__(self) -> str:
        return f"pinned memory {self.number} ({self.size} bytes)"


class _DLTensor(ctypes.Structure):
    """A DLManagedTensor of one dimension, which torch takes for memory of a device."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_CUDA, _UINT = 2, 1  # of DLPack
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_resize = torch.UntypedStorage.resize_
_ONE = (ctypes.c_int64 * 1)(1)
_structures: dict[int, tuple[Any, Memory, Block]] = {}  # of tensors that live, whichever simulation made them


class Memory:
    """The memory of all simulated devices of a process."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._live: dict[int, Block] = {}  # by address
        self._pinned: dict[int, Pinned] = {}  # by number
        self._serial = 0
        self.used: Counter[int] = Counter()  # bytes by device
        self.peak: Counter[int] = Counter()

    def empty(self, size: Any, stride: Any, dtype: torch.dtype, index: int) -> torch.Tensor:
        """Allocate a tensor for the current stream of a device."""
        with self._device.lock, torch._C._AutoDispatchBelowAutograd():
            self.collect()
            stream = self._device.current(index)
            count = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
            self._serial += 1
            block = Block(count * dtype.itemsize, stream, self._serial)
            if block.size:
                self._live[block.bytes.data_ptr()] = block
            self.used[index] += block.size
            self.peak[index] = max(self.peak[index], self.used[index])
            return aten.as_strided_(aten.view.dtype(self._raw(block, index), dtype), size, stride, 0)

    def _raw(self, block: Block, index: int) -> torch.Tensor:
        shape = (ctypes.c_int64 * 1)(block.size)
        deleter = ctypes.cast(guard.library().note_freed, ctypes.c_void_p)
        address = block.bytes.data_ptr()
        structure = _DLTensor(address, _CUDA, index, 1, _UINT, 8, 1, shape, _ONE, 0, None, deleter)
        _structures[ctypes.addressof(structure)] = (structure, shape), self, block
        return torch.utils.dlpack.from_dlpack(_capsule(ctypes.addressof(structure), b"dltensor", None))

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Free the memory of a storage, or allocate some for one that has none."""
        if storage.device.type != "cuda":
            _resize(storage, size)
            return
        if size and storage.nbytes():
            raise NotImplementedError(
                f"a storage of {storage.nbytes()} bytes is resized to {size}, which is not simulated"
            )
        fresh = self.empty((size,), (1,), torch.uint8, storage.device.index).untyped_storage()
        guard.library().exchange_memory(storage._cdata, fresh._cdata)

    def collect(self) -> None:
        """Give what was freed since the last call to its stream at once."""
        while address := guard.library().take_freed():
            _, memory, block = _structures.pop(address)
            if memory is not self or not block.size:  # of an earlier simulation
                continue
            del self._live[block.bytes.data_ptr()]
            self.used[block.stream.device] -= block.size
            self._reuse(block)

    def _reuse(self, block: Block) -> None:
        """Poison a block as the next allocation of its stream may, whatever other streams do with it."""
        stream, device = block.stream, self._device
        device.inform(stream)
        events = [device.mark(recorded) for recorded in block.recorded]
        for access in block.accesses.unordered(stream, but=block.recorded):
            if any(access.number <= event.clock.get(access.stream, 0) for event in events):
                continue  # what a recorded stream has waited for
            text = f"{block} is freed while it is in use, and may be handed out; record_stream is missing:"
            device.report(text, access)
        if not block.recorded:
            device.issue(stream, "reuse of memory", block.poison)
        else:  # handed out when all that use it are done; its stream does not wait for them
            ready = self._all_done([device.mark(s) for s in block.recorded | {stream}])
            aside = device.stream(stream.device, -1)
            device.issue(aside, "reuse of recorded memory", block.poison, ready=ready)

    def _all_done(self, marks: list[Any]) -> Any:
        return lambda: all(map(self._device.done, marks))

    def now(self, index: int) -> int:
        """Return the bytes of a device that live."""
        with self._device.lock:
            self.collect()
            return self.used[index]

    def reset_peak(self, index: int) -> None:
        self.peak[index] = self.now(index)

    def block(self, tensor: torch.Tensor) -> Block | None:
        return self._live.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None

    def _pinned_block(self, tensor: torch.Tensor) -> Pinned | None:
        storage = tensor.untyped_storage()
        number = guard.library().pinned_number(storage.data_ptr()) if tensor.numel() else 0
        return self._pinned.setdefault(number, Pinned(storage.nbytes(), number)) if number else None

    def region(self, tensor: torch.Tensor) -> Region | None:
        """Return what a tensor shows, or None where it has no elements or is pageable memory of the host."""
        block = self.block(tensor) if tensor.is_cuda else self._pinned_block(tensor)
        if block is None:
            return None
        shape, stride, itemsize = tuple(tensor.size()), tensor.stride(), tensor.itemsize
        low = tensor.storage_offset() * itemsize
        reach = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        return Region(block, low, low + reach * itemsize, shape, stride, itemsize)

    def host_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the memory of a device tensor as a tensor of the CPU."""
        block = self.block(tensor)
        if block is None:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
        whole = block.bytes.view(tensor.dtype)
        return torch.as_strided(whole, tensor.size(), tensor.stride(), tensor.storage_offset())

    def record(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the memory of a tensor, once freed, until what a stream has then is done."""
        block = self.block(tensor)
        if block is not None and stream is not block.stream:
            block.recorded.add(stream)
