"""Write and read safetensors files: with digests, flushed to the disk, and trusting nothing that is read.

The package safetensors does not serve here. Its writer copies all tensors first, and neither hashes nor
flushes. Its reader maps the file, whose bytes may change between their check and their use; a process that
reads a mapped file dies where another cuts it.
"""

import ctypes
import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .errors import CheckpointError, escaped, reading
from .threads import in_threads


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype without the name of its package.

    >>> dtype_name(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in DTYPES.items()}
DTYPES_BY_NAME = {dtype_name(dtype): dtype for dtype in DTYPES.values()}

_MOST_HEADER = 100_000_000  # bytes, as safetensors has it
_CHUNK = 2**22  # bytes of a tensor that have a digest of their own
_PIECE = 2**18  # bytes that are hashed while they are in the cache
_MEMORY = {b"{": 210, b"[": 90, b",": 60}  # bytes of memory that JSON takes for each of these, at most


class FileRecord(NamedTuple):
    """Describe a file that was written.

    Args:
        size: in bytes.
        header: SHA-256 of what is before the tensors.
        digests: of every tensor, by name, as :func:`_digest` has them.
    """

    size: int
    header: str
    digests: dict[str, str]


class Span(NamedTuple):
    """Place a tensor in a file: its bytes are those from ``begin`` to ``end``."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def require_storable(tensor: torch.Tensor, name: str) -> None:
    """Raise TypeError for a tensor that no safetensors file holds."""
    if tensor.dtype not in _CODES:
        raise TypeError(f"{name} has the dtype {tensor.dtype}, expected one of {', '.join(DTYPES_BY_NAME)}")
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise TypeError(
            f"{name} is on {tensor.device} with the layout {tensor.layout}, expected a dense tensor with"
            " values; save it as one, such as by to_dense()"
        )


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Bring a tensor to the CPU, in row-major memory, without history."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def copied(tensor: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    """Copy to the CPU, in row-major memory: in that of ``into``, if it is for such a tensor."""
    if into is None or (into.dtype, into.shape) != (tensor.dtype, tensor.shape):
        into = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return into.copy_(tensor.detach())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """View the memory of a row-major tensor on the CPU, which the caller keeps alive."""
    return memoryview(
        (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr() if tensor.numel() else 1)
    ).cast("B")


def _digest(size: int, bring: Callable[[int, int], memoryview]) -> str:
    """Digest a tensor of ``size`` bytes: the SHA-256 of the SHA-256 of its chunks, in order, so that several
    threads hash one tensor.

    Args:
        bring: reads or writes the bytes from a begin to an end, and returns them.
    """

    def digest(chunk: int) -> bytes:
        state = hashlib.sha256()
        for begin in range(chunk, min(chunk + _CHUNK, size), _PIECE):
            state.update(bring(begin, min(begin + _PIECE, size)))
        return state.digest()

    return hashlib.sha256(b"".join(in_threads(digest, range(0, size, _CHUNK)))).hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> FileRecord:
    """Write a new safetensors file, and flush it to the disk.

    Args:
        tensors: by name, on any device.
        metadata: texts for the header.
    """
    # Large items first, so that each tensor begins at a multiple of its item.
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        entries[name] = {
            "dtype": _CODES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    require_readable(text, _MOST_HEADER, f"the header of {path.name}")
    header = len(text).to_bytes(8, "little") + text
    with new_file(path) as file:
        write_at(file, header, 0)

        def put(name: str) -> str:
            host, at = on_host(tensors[name]), len(header) + entries[name]["data_offsets"][0]
            memory = bytes_of(host)

            def bring(begin: int, end: int) -> memoryview:
                write_at(file, memory[begin:end], at + begin)
                return memory[begin:end]

            return _digest(len(memory), bring)

        digests = dict(zip(order, in_threads(put, order), strict=True))
    return FileRecord(len(header) + end, hashlib.sha256(header).hexdigest(), digests)


@contextmanager
def new_file(path: Path) -> Iterator[FileIO]:
    """Make a file to write to; flush it to the disk in the end. Errors of the disk name it."""
    try:
        with open(path, "xb", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o666)) as file:
            yield file
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)
        raise


def write_at(file: FileIO, data: bytes | memoryview, at: int) -> None:
    """Write all bytes at an offset."""
    left = memoryview(data)
    while len(left):
        done = os.pwrite(file.fileno(), left, at)
        left, at = left[done:], at + done


class TensorFile(NamedTuple):
    """Read a safetensors file that is open: made by :func:`open_tensors`.

    Args:
        name: of the folder and the file, for errors.
        size: in bytes.
        header: SHA-256 of what is before the tensors.
        spans: of all tensors, by name.
    """

    name: str
    file: FileIO
    size: int
    header: str
    spans: dict[str, Span]

    def read(self, name: str, into: torch.Tensor | None = None) -> str:
        """Read a tensor into a row-major one on the CPU, or nowhere; return its digest."""
        span = self.spans[name]
        memory = None if into is None else bytes_of(into)

        def bring(begin: int, end: int) -> memoryview:
            piece = memoryview(bytearray(end - begin)) if memory is None else memory[begin:end]
            read_at(self.file, self.name, piece, span.begin + begin)
            return piece

        return _digest(span.end - span.begin, bring)


@contextmanager
def open_tensors(folder: Path, name: str) -> Iterator[TensorFile]:
    """Open a safetensors file of a folder, and check its header.

    Raises:
        CheckpointError: it is not there, cannot be read, or its header is malformed.
    """
    path = f"{folder.name}/{name}"
    with open_plain(folder, name) as (file, size):
        length = bytearray(8)
        read_at(file, path, memoryview(length), 0)
        end = 8 + int.from_bytes(length, "little")
        if end > min(_MOST_HEADER + 8, size):
            raise CheckpointError(
                f"{escaped(path)} claims a header of {end - 8} bytes, in a file of {size} bytes"
            )
        text = bytearray(end - 8)
        read_at(file, path, memoryview(text), 8)
        entries = read_json(bytes(text), path)
        entries.pop("__metadata__", None)
        header = hashlib.sha256(length + text).hexdigest()
        spans = {tensor: _span(path, tensor, entry, end) for tensor, entry in entries.items()}
        for tensor, span in sorted(spans.items(), key=lambda item: item[1][2:]):
            if span.begin != end:
                raise CheckpointError(
                    f"{escaped(path)}: tensor {escaped(tensor)} begins at byte {span.begin}, the one before"
                    f" ends at {end}"
                )
            end = span.end
        if end != size:
            raise CheckpointError(
                f"{escaped(path)} has {size} bytes, expected {end}: it is cut, or something was added"
            )
        yield TensorFile(path, file, size, header, spans)


def _span(path: str, name: str, entry: Any, base: int) -> Span:
    where = f"{escaped(path)}: tensor {escaped(name)}"
    if (
        type(entry) is not dict
        or entry.keys() != {"dtype", "shape", "data_offsets"}
        or str(entry["dtype"]) not in DTYPES
    ):
        raise CheckpointError(
            f"{where} has the entry {escaped(entry)} in the header, expected a known dtype, shape and"
            " data_offsets"
        )
    dtype, shape, offsets = DTYPES[str(entry["dtype"])], entry["shape"], entry["data_offsets"]
    fits = is_sizes(shape) and is_sizes(offsets) and len(offsets) == 2
    if not fits or math.prod(shape) * dtype.itemsize != offsets[1] - offsets[0]:
        raise CheckpointError(
            f"{where} has the shape {escaped(shape)} at the bytes {escaped(offsets)}, expected as many bytes"
            " as elements take"
        )
    return Span(dtype, tuple(shape), base + offsets[0], base + offsets[1])


@contextmanager
def open_plain(folder: Path, name: str) -> Iterator[tuple[FileIO, int]]:
    """Open a file of a folder for reading; also give its size in bytes.

    Raises:
        CheckpointError: it is not there, is no regular file, or cannot be read.
    """
    with (
        reading(f"{folder.name}/{name}"),
        # Not as a pipe, which would be waited for.
        open(
            folder / name,
            "rb",
            buffering=0,
            opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK),
        ) as file,
    ):
        if not stat.S_ISREG((status := os.fstat(file.fileno())).st_mode):
            raise CheckpointError(f"{escaped(f'{folder.name}/{name}')} is no regular file")
        yield file, status.st_size


def read_at(file: FileIO, name: str, memory: memoryview, at: int) -> None:
    """Read from an offset until the memory is full."""
    while len(memory):
        done = os.preadv(file.fileno(), [memory], at)
        if not done:
            raise CheckpointError(f"{escaped(name)} is cut: it ends at byte {at}")
        memory, at = memory[done:], at + done


def read_plain(folder: Path, name: str, most: int) -> bytes:
    """Read a file of a folder that has at most so many bytes."""
    with open_plain(folder, name) as (file, size):
        if size > most:
            raise CheckpointError(
                f"{escaped(f'{folder.name}/{name}')} has {size} bytes, expected at most {most}"
            )
        text = bytearray(size)
        read_at(file, f"{folder.name}/{name}", memoryview(text), 0)
    return bytes(text)


def require_readable(text: bytes, most: int, what: str) -> None:
    """Raise ValueError for JSON whose values would take more than 2**30 bytes, or 16 times its text.

    ``[],[],...`` would take 24 times its text; a checkpoint takes 3 to 12 times.
    """
    memory = sum(text.count(mark) * cost for mark, cost in _MEMORY.items())
    if len(text) > most or memory > min(16 * len(text) + 2**16, 2**30):
        raise ValueError(
            f"{what} has {len(text)} bytes, whose values may take {memory} bytes of memory; expected at most"
            f" {most} bytes, and 16 times as much memory; save fewer tensors, with shorter names"
        )


def read_json(text: bytes, name: str) -> dict[str, Any]:
    """Parse a dictionary that is not too deep and not too dense. Of a name that comes twice, the last counts.

    Raises:
        CheckpointError: it is malformed.
    """
    try:
        require_readable(text, len(text), "it")
        content = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{escaped(name)} has no JSON that can be read: {escaped(error)}") from None
    if type(content) is not dict:
        raise CheckpointError(f"{escaped(name)} has JSON that is no dictionary")
    return content


def is_sizes(value: Any) -> bool:
    """Tell whether this is a list of sizes."""
    return type(value) is list and len(value) <= 64 and all(type(n) is int and 0 <= n < 2**63 for n in value)
