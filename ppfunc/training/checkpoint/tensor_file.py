"""Write and read safetensors files: with digests, flushed to the disk, and trusting nothing that is read.

The package safetensors is not used here: it writes without a digest and without flushing, and reads memory that the file may still change.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from .errors import CheckpointError, escaped, reading
from .threads import in_threads


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype without the name of its package.

    >>> dtype_name(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16, "U32": torch.uint32,
    "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in DTYPES.items()}
DTYPES_BY_NAME = {dtype_name(dtype): dtype for dtype in DTYPES.values()}

_MOST_HEADER = 100_000_000  # bytes, as safetensors has it
_CHUNK = 2**22  # bytes of a tensor that have a digest of their own
_PIECE = 2**18  # bytes that are hashed while they are in the cache


class FileRecord(NamedTuple):
    """A file that was written.

    Args:
        size: in bytes.
        header: SHA-256 of what is before the tensors.
        digests: of every tensor, by name, as :func:`_digest` has them.
    """

    size: int
    header: str
    digests: dict[str, str]


class Span(NamedTuple):
    """A tensor in a file: its bytes are those from ``begin`` to ``end``."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def require_storable(tensor: Tensor, name: str) -> None:
    """Raise TypeError for a tensor that no safetensors file holds."""
    if tensor.dtype not in _CODES:
        raise TypeError(f"{name} has the dtype {tensor.dtype}, expected one of {', '.join(DTYPES_BY_NAME)}")
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise TypeError(f"{name} is on {tensor.device} with the layout {tensor.layout}, expected a dense tensor with values")


def on_host(tensor: Tensor) -> Tensor:
    """Bring a tensor to the CPU, in row-major memory, without history."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def copied(tensor: Tensor, into: Tensor | None) -> Tensor:
    """Copy to the CPU, in row-major memory: in that of ``into``, if it is for such a tensor."""
    if into is None or (into.dtype, into.shape) != (tensor.dtype, tensor.shape):
        into = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return into.copy_(tensor.detach())


def bytes_of(tensor: Tensor) -> memoryview:
    """View the memory of a row-major tensor on the CPU, which the caller keeps alive."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr() if tensor.numel() else 1)).cast("B")


def _digest(size: int, bring: Callable[[int, int], memoryview]) -> str:
    """Digest a tensor of ``size`` bytes: the SHA-256 of the SHA-256 of its chunks, in order, so that several threads hash one tensor.

    Args:
        bring: reads or writes the bytes from a begin to an end, and returns them.
    """

    def digest(chunk: int) -> bytes:
        state = hashlib.sha256()
        for begin in range(chunk, min(chunk + _CHUNK, size), _PIECE):
            state.update(bring(begin, min(begin + _PIECE, size)))
        return state.digest()

    return hashlib.sha256(b"".join(in_threads(digest, range(0, size, _CHUNK)))).hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileRecord:
    """Write a new file, and flush it to the disk.

    Args:
        tensors: by name, on any device.
        metadata: texts for the header.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))  # so that each begins at a multiple of its item
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        entries[name] = {"dtype": _CODES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    if len(text) > _MOST_HEADER:
        raise ValueError(
            f"{path.name}: the header takes {len(text)} bytes, expected at most {_MOST_HEADER}; use fewer tensors or shorter names"
        )
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _write(file, memoryview(header), 0)

        def put(name: str) -> str:
            host, at = on_host(tensors[name]), len(header) + entries[name]["data_offsets"][0]
            memory = bytes_of(host)

            def bring(begin: int, end: int) -> memoryview:
                _write(file, memory[begin:end], at + begin)
                return memory[begin:end]

            return _digest(len(memory), bring)

        digests = dict(zip(order, in_threads(put, order), strict=True))
        os.fsync(file)
    finally:
        os.close(file)
    return FileRecord(len(header) + end, hashlib.sha256(header).hexdigest(), digests)


def _write(file: int, memory: memoryview, at: int) -> None:
    while len(memory):
        done = os.pwrite(file, memory, at)
        memory, at = memory[done:], at + done


class TensorFile:
    """A safetensors file that is open for reading; a context manager.

    Args:
        folder: with the file, whose name is that of no link.

    Raises:
        CheckpointError: it is not there, no plain file, or its header is none.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name = f"{folder.name}/{name}"
        self._file = open_plain(folder, name)
        try:
            self.size = os.fstat(self._file).st_size
            self.spans, self.header = self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> tuple[dict[str, Span], str]:
        length = bytearray(8)
        self._read(memoryview(length), 0)
        size = int.from_bytes(length, "little")
        if size > min(_MOST_HEADER, self.size - 8):
            raise CheckpointError(f"{escaped(self.name)} claims a header of {size} bytes, in a file of {self.size}")
        text = bytearray(size)
        self._read(memoryview(text), 8)
        entries = read_json(bytes(text), self.name)
        metadata = entries.pop("__metadata__", {})
        if type(metadata) is not dict or any(type(value) is not str for value in metadata.values()):
            raise CheckpointError(f"{escaped(self.name)}: the metadata in the header is no dictionary of texts")
        spans = {name: self._span(name, entry, 8 + size) for name, entry in entries.items()}
        end = 8 + size
        for name, span in sorted(spans.items(), key=lambda item: item[1][2:]):
            if span.begin != end:
                raise CheckpointError(
                    f"{escaped(self.name)}: tensor {escaped(name)} begins at byte {span.begin}, the one before ends at {end}"
                )
            end = span.end
        if end != self.size:
            raise CheckpointError(f"{escaped(self.name)} has {self.size} bytes, expected {end}: it is cut, or something was added")
        return spans, hashlib.sha256(length + text).hexdigest()

    def _span(self, name: str, entry: Any, base: int) -> Span:
        """Check an entry of the header."""
        if type(entry) is not dict or entry.keys() != {"dtype", "shape", "data_offsets"} or str(entry["dtype"]) not in DTYPES:
            raise CheckpointError(f"{escaped(self.name)}: tensor {escaped(name)} has the entry {escaped(entry)} in the header")
        dtype, shape, offsets = DTYPES[str(entry["dtype"])], entry["shape"], entry["data_offsets"]
        fits = is_sizes(shape) and is_sizes(offsets) and len(offsets) == 2
        if not fits or math.prod(shape) * dtype.itemsize != offsets[1] - offsets[0]:
            raise CheckpointError(
                f"{escaped(self.name)}: tensor {escaped(name)} has the shape {escaped(shape)} at the bytes {escaped(offsets)}"
            )
        return Span(dtype, tuple(shape), base + offsets[0], base + offsets[1])

    def read(self, name: str, into: Tensor | None = None) -> str:
        """Read a tensor into a row-major one on the CPU, or nowhere; returns its digest."""
        span = self.spans[name]
        memory = None if into is None else bytes_of(into)

        def bring(begin: int, end: int) -> memoryview:
            piece = memoryview(bytearray(end - begin)) if memory is None else memory[begin:end]
            self._read(piece, span.begin + begin)
            return piece

        return _digest(span.end - span.begin, bring)

    def _read(self, memory: memoryview, at: int) -> None:
        while len(memory):
            with reading(self.name):
                done = os.preadv(self._file, [memory], at)
            if not done:
                raise CheckpointError(f"{escaped(self.name)} is cut: it ends at byte {at}")
            memory, at = memory[done:], at + done

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_plain(folder: Path, name: str) -> int:
    """Open a file of a folder for reading; not through a link, and nothing else than a plain file.

    Raises:
        CheckpointError: it is not there, or something else.
    """
    try:
        file = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise CheckpointError(f"{escaped(f'{folder.name}/{name}')} is lost") from None
    except OSError as error:
        raise CheckpointError(f"{escaped(f'{folder.name}/{name}')} is a link, or cannot be read: {error.strerror}") from error
    with ExitStack() as opened, reading(f"{folder.name}/{name}"):
        opened.callback(os.close, file)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise CheckpointError(f"{escaped(f'{folder.name}/{name}')} is no plain file")
        opened.pop_all()
    return file


def read_plain(folder: Path, name: str, most: int) -> bytes:
    """Read a small file of a folder."""
    file = open_plain(folder, name)
    with ExitStack() as opened, reading(f"{folder.name}/{name}"):
        opened.callback(os.close, file)
        size = os.fstat(file).st_size
        if size > most:
            raise CheckpointError(f"{escaped(f'{folder.name}/{name}')} has {size} bytes, expected at most {most}")
        text = bytearray()
        while len(text) < size and (piece := os.pread(file, size - len(text), len(text))):
            text += piece
    return bytes(text)


def read_json(text: bytes, name: str) -> dict[str, Any]:
    """Parse a dictionary: no name twice, no number that is none, not too deep.

    Raises:
        CheckpointError: it is none.
    """
    try:
        found = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{escaped(name)} has no JSON that can be read: {escaped(error)}") from None
    if type(found) is not dict:
        raise CheckpointError(f"{escaped(name)} has JSON that is no dictionary")
    return found


def is_sizes(value: Any) -> bool:
    """Tell whether this is a list of sizes."""
    return type(value) is list and len(value) <= 64 and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the name {key[:200]!r} comes twice")
        found[key] = value
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"got the number {text}")
