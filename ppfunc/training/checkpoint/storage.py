"""Keep tensors in a folder: parts of them in safetensors files, and the manifest that says where they are.

Files are written and read here, not by ``HuggingFaceStorageWriter`` and ``HuggingFaceStorageReader`` of
``torch.distributed.checkpoint``. The writer holds all tensors of a rank twice more in memory, and its ranks
plan by pickles. The reader maps files, so that a process dies where a disk fails, opens every file on every
rank, and leaves elements that no file has as they were. Neither has digests: here bytes are hashed on their
way, while they are in the cache.
"""

import ctypes
import hashlib
import json
import math
import os
import re
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import torch

from ppfunc._checks import limited
from ppfunc.stage._torch import is_dtensor
from ppfunc.stage.layout import local

from ..optim._torch import shape_and_offset
from ..update.state import CODES, DTYPES
from .naming import escaped, listed
from .peers import CheckpointError

T = TypeVar("T")
Value = bool | int | float | str

MANIFEST = "manifest.json"
_FORMAT = "ppfunc checkpoint, version 4"
_NAME = re.compile(r"step-(0|[1-9]\d{0,18})(\.(writing|deleting)-[0-9a-f]+)?", re.ASCII)
_PIECE = 2**18  # bytes that are hashed while they are in the cache


# -- what a folder holds


class Box(NamedTuple):
    """Describe a part of a tensor: the offset of its first element, and its shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of_whole(cls, shape: Iterable[int]) -> Self:
        """Make the box of a whole tensor."""
        sizes = tuple(shape)
        return cls((0,) * len(sizes), sizes)

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Return the slices of this box in a tensor that holds ``outer``."""
        return tuple(
            slice(a - b, a - b + n) for a, b, n in zip(self.offset, outer.offset, self.shape, strict=True)
        )

    def __and__(self, other: "Box") -> "Box | None":
        """Intersect two boxes.

        Returns:
            The box of the elements in both, or None.

        >>> Box((0, 0), (2, 4)) & Box((1, 2), (5, 5)), Box((0,), (2,)) & Box((2,), (1,))
        (Box(offset=(1, 2), shape=(1, 2)), None)
        """
        starts = tuple(map(max, self.offset, other.offset))
        ends = (min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True))
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, shape) if all(size > 0 for size in shape) else None


class Part(NamedTuple):
    """Place a box of a tensor in a file: its offset and size in bytes, and in a checkpoint its SHA-256."""

    box: Box
    file: str
    begin: int = 0
    size: int = 0
    sha256: str = ""


class Stored(NamedTuple):
    """Describe a tensor in files: dtype and shape of the whole, and parts that hold each element once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...] = ()

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Contents(NamedTuple):
    """List the tensors and values of a folder.

    Args:
        tensors, values: contents, by name.
        headers: the parts of files before their tensors; none where there are no digests.
        step: number of the checkpoint; None for a folder of another library.
        run: the id of the run, or None.
        objects: names of what is stored as a pickle, and never read.
    """

    tensors: Mapping[str, Stored]
    values: Mapping[str, Value] = {}
    headers: Sequence[Part] = ()
    step: int | None = None
    run: str | None = None
    objects: Sequence[str] = ()


Reader = Callable[[str, Part, torch.Tensor | None], object]
"""``(name, part, into)``: read a part of a tensor into a row-major tensor on the CPU, or nowhere."""


def box_of(tensor: torch.Tensor, name: str) -> Box:
    """Find the part of a tensor that this rank holds; all of a plain tensor.

    Raises:
        ValueError: a DTensor whose ranks hold parts of a sum, or parts that are no boxes.
    """
    if not is_dtensor(tensor):
        return Box.of_whole(tensor.shape)
    if not tensor.device_mesh.get_coordinate():  # this rank holds nothing
        return Box((0,) * tensor.ndim, (0,) * tensor.ndim)
    from torch.distributed.tensor import Replicate, Shard  # here, because the import takes long

    if other := [p for p in tensor.placements if type(p) not in (Shard, Replicate)]:
        raise ValueError(
            f"{name} has the placement {other[0]}, whose parts are no boxes; redistribute it to Shard or"
            " Replicate first"
        )
    shape, offset = shape_and_offset(tensor)
    if shape != local(tensor).shape:
        raise ValueError(
            f"{name}: this rank holds the shape {list(local(tensor).shape)}, its placements"
            f" {tensor.placements} give {shape}"
        )
    return Box(offset, shape)


def require_tiled(boxes: Iterable[Box], shape: Sequence[int], name: str) -> None:
    """Raise ValueError unless boxes hold each element of a tensor once."""
    whole, filled = Box.of_whole(shape), sorted(box for box in boxes if math.prod(box.shape))
    open_: list[Box] = []  # those that may overlap the next one, whose offsets are not smaller
    wrong = sum(math.prod(box.shape) for box in filled) != math.prod(shape)
    for box in filled:
        open_ = [o for o in open_ if not o.shape or o.offset[0] + o.shape[0] > box.offset[0]]
        wrong = wrong or len(box.offset) != len(whole.shape) or box & whole != box
        wrong = wrong or any(o & box for o in open_)
        open_.append(box)
    if wrong:
        shown = ", ".join(f"{list(box.shape)} at {list(box.offset)}" for box in filled)
        raise ValueError(
            f"{name} of shape {list(shape)} has the parts {limited(shown, 200) or 'none'}, expected parts"
            " that hold each element once"
        )


# -- bytes of files


def in_threads(work: Callable[[T], object], tasks: Collection[T]) -> None:
    """Run ``work`` on every task, several at a time: hashing, reading and writing release the lock of Python.

    A task opens its file itself: whoever is interrupted here leaves threads behind that end soon. Threads of
    ``concurrent.futures`` do not serve: they end before an asynchronous save that the process waits for.
    """
    todo, failures = iter(list(tasks)), list[BaseException]()

    def run() -> None:
        try:
            for task in todo:
                if not failures:
                    work(task)
        except BaseException as error:
            failures.append(error)

    count = min(os.cpu_count() or 1, 8, len(tasks)) - 1
    helpers = [threading.Thread(target=run, daemon=True) for _ in range(count)]
    for helper in helpers:
        helper.start()
    run()
    for helper in helpers:
        helper.join()
    if failures:
        raise failures[0]


def flush_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


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


def write_at(file: FileIO, data: bytes | memoryview, at: int = 0) -> str:
    """Write all bytes at an offset. Return their SHA-256."""
    digest, left = hashlib.sha256(), memoryview(data)
    while len(left):
        done = os.pwrite(file.fileno(), left[:_PIECE], at)
        digest.update(left[:done])
        left, at = left[done:], at + done
    return digest.hexdigest()


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn errors of the operating system into CheckpointError, so that an earlier checkpoint is tried."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror or error}") from error


def title(path: Path) -> str:
    """Name a file with its folder, for errors."""
    return escaped(f"{path.parent.name}/{path.name}")


@contextmanager
def open_plain(path: Path) -> Iterator[tuple[BufferedReader, int]]:
    """Open a file of a folder for reading; also give its size in bytes.

    Raises:
        CheckpointError: it is not there, is no regular file, or cannot be read.
    """
    with (
        reading(title(path)),
        # Not as a pipe, which would be waited for.
        open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file,
    ):
        if not stat.S_ISREG((status := os.fstat(file.fileno())).st_mode):
            raise CheckpointError(f"{title(path)} is no regular file")
        yield file, status.st_size


def read_at(path: Path, begin: int, size: int, memory: memoryview | None = None) -> str:
    """Read bytes of a file into a memory, or nowhere. Return their SHA-256."""
    digest, at, scratch = hashlib.sha256(), 0, memoryview(bytearray(_PIECE if memory is None else 0))
    with open_plain(path) as (file, length):
        while at < size:
            piece = scratch[: size - at] if memory is None else memory[at : at + _PIECE]
            done = os.preadv(file.fileno(), [piece], begin + at)
            if not done:
                raise CheckpointError(
                    f"{title(path)} is cut: it has {length:,} bytes, expected {begin + size:,}"
                )
            digest.update(piece[:done])
            at += done
    return digest.hexdigest()


def read_plain(path: Path, begin: int = 0, size: int = -1) -> bytes:
    """Read bytes of a file, all that follow unless ``size`` is given."""
    with open_plain(path) as (file, length):
        if begin + size > length:
            raise CheckpointError(f"{title(path)} is cut: it has {length:,} bytes, expected {begin + size:,}")
        file.seek(begin)
        return file.read(size)


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """View the memory of a row-major tensor on the CPU, which the caller keeps alive."""
    address = tensor.data_ptr() if tensor.numel() else 1
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(address)).cast("B")


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Bring a tensor to the CPU, in row-major memory, without history."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def require_storable(tensor: torch.Tensor, name: str) -> None:
    """Raise TypeError for a tensor that no safetensors file holds."""
    if tensor.dtype not in CODES:
        raise TypeError(f"{name} has the dtype {tensor.dtype}, expected one of {', '.join(map(str, CODES))}")
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise TypeError(
            f"{name} is on {tensor.device} with the layout {tensor.layout}, expected a dense tensor with"
            " values; save it as one, such as by to_dense()"
        )


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int, str]]:
    """Write a new safetensors file, and flush it to the disk. Each thread has a single tensor on the host.

    Args:
        tensors: tensors by name, on any device.

    Returns:
        Offset, size and SHA-256 of the bytes of each tensor, by name, and of the header: ``__metadata__``.
    """
    # Large items first, so that each tensor begins at a multiple of its item.
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor, begin, end = tensors[name], end, end + tensors[name].nbytes
        code, shape = CODES[tensor.dtype], list(tensor.shape)
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    places: dict[str, tuple[int, int, str]] = {}

    def put(name: str) -> None:
        host, begin = on_host(tensors[name]), len(header) + entries[name]["data_offsets"][0]
        with open(path, "r+b", buffering=0) as file:
            places[name] = begin, host.nbytes, write_at(file, _memory_of(host), begin)

    with new_file(path) as file:
        places["__metadata__"] = 0, len(header), write_at(file, header)
        in_threads(put, order)
    return places


# -- folders of checkpoints


def step_of(folder: Path) -> int | None:
    """Read the step from the name of a folder; another name has no step.

    >>> step_of(Path("runs/step-12")), step_of(Path("runs/step-12.writing-a0"))
    (12, None)
    """
    match = _NAME.fullmatch(folder.name)
    return None if match is None or match[2] else int(match[1])


def on_the_way(folder: Path) -> bool:
    """Tell by its name whether a folder is being written or deleted."""
    match = _NAME.fullmatch(folder.name)
    return match is not None and match[2] is not None


def checkpoints(root: Path) -> list[Path]:
    """List the checkpoints in a folder, good or not, the latest first; a file of such a name is not good."""
    with reading(escaped(root)):
        paths = [Path(entry.path) for entry in os.scandir(root)] if root.is_dir() else []
    steps = {path: step for path in paths if (step := step_of(path)) is not None}
    return sorted(steps, key=steps.__getitem__, reverse=True)


def manifest_text(contents: Contents) -> bytes:
    """Write the manifest of a checkpoint: JSON in a canonical form, with its own digest."""
    tensors = {name: (CODES[s.dtype], s.shape, s.parts) for name, s in contents.tensors.items()}
    return signed({"format": _FORMAT, **contents._asdict(), "tensors": tensors})


def signed(content: Any) -> bytes:
    """Write JSON in a canonical form (sorted keys, no spaces), followed by its digest."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f'{{"content":{text},"sha256":"{hashlib.sha256(text.encode()).hexdigest()}"}}\n'.encode()


def _read_manifest(path: Path) -> Contents:
    """Read the manifest of a checkpoint, and check it: its digest is right, every tensor is covered once."""
    text = read_plain(path)
    try:
        content = json.loads(text)["content"]
        if text != signed(content):
            raise ValueError("its digest is another than that of its content")
        if (known := content.pop("format")) != _FORMAT:
            raise ValueError(f"got the format {escaped(known)}, expected {_FORMAT!r}")
        tensors: dict[str, Stored] = {}
        for name, (dtype, shape, parts) in content.pop("tensors").items():
            tensors[name] = Stored(DTYPES[dtype], tuple(shape), tuple(map(_part, parts)))
            require_tiled([part.box for part in tensors[name].parts], shape, f"tensor {escaped(name)}")
        return Contents(tensors, headers=[_part(part) for part in content.pop("headers")], **content)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{title(path)} is damaged or foreign: {type(error).__name__}: {str(error)[:500]}"
        ) from None


def _part(entry: Any) -> Part:
    box, *place = entry
    return Part(Box(*map(tuple, box)), *place)


def open_checkpoint(folder: Path) -> Contents:
    """Read the manifest of a checkpoint and the headers of its files, without tensors; check all sizes.

    Raises:
        CheckpointError: a file is lost or cut, or the checkpoint is that of another step, or cannot be read.
    """
    with reading(escaped(folder)):  # another save may delete it
        if not folder.is_dir():
            raise CheckpointError(f"{escaped(folder)} is no folder on a disk that all ranks share")
        if on_the_way(folder):
            raise CheckpointError(f"{escaped(folder.name)} was not committed")
        contents = _read_manifest(folder / MANIFEST)
        sizes: dict[str, int] = {}
        for part in (part for stored in contents.tensors.values() for part in stored.parts):
            sizes[part.file] = max(sizes.get(part.file, 0), part.begin + part.size)
        for header in contents.headers:
            path, expected = folder / header.file, max(sizes.pop(header.file, 0), header.size)
            if path.parent != folder:
                raise CheckpointError(f"{escaped(header.file)} is outside of {escaped(folder.name)}")
            with open_plain(path) as (_, size):
                if size != expected:
                    raise CheckpointError(f"{title(path)} has {size:,} bytes, expected {expected:,}")
            require_bytes(folder, "the header", header)
    if sizes:
        raise CheckpointError(f"{title(folder / MANIFEST)} has no header of {listed(sizes)}")
    if step_of(folder) not in (None, contents.step):
        raise CheckpointError(
            f"{escaped(folder.name)} holds the checkpoint of step {contents.step}; give it that name"
        )
    return contents


def require_bytes(folder: Path, what: str, part: Part, into: torch.Tensor | None = None) -> None:
    """Read a part of a file; raise CheckpointError unless its bytes have their digest."""
    path, memory = folder / part.file, None if into is None else _memory_of(into)
    if read_at(path, part.begin, part.size, memory) != part.sha256:
        raise CheckpointError(
            f"{what} in {title(path)} has other bytes than were written: its digest differs"
        )


def reader_of(folder: Path) -> Reader:
    """Make the function that reads parts of the tensors of a checkpoint, and verifies their bytes."""
    return lambda name, part, into: require_bytes(folder, f"tensor {escaped(name)}", part, into)


def verify(folder: Path) -> Contents:
    """Read a checkpoint, and raise CheckpointError unless every byte is as it was written."""
    contents, read = open_checkpoint(folder), reader_of(folder)
    parts = [(name, part) for name, stored in contents.tensors.items() for part in stored.parts]
    in_threads(lambda task: read(*task, None), parts)
    return contents
