"""Write and read ``manifest.json``: what a checkpoint holds, and the sign that it is whole."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from ppfunc.stage._torch import is_dtensor
from ppfunc.stage.layout import local

from .._torch import shape_and_offset
from .errors import CheckpointError, escaped
from .tensor_file import DTYPES_BY_NAME, dtype_name, read_json, read_plain, require_readable

MANIFEST = "manifest.json"
_FORMAT, _VERSION = "ppfunc checkpoint", 3
_MOST = 2**28  # bytes

Value = bool | int | float | str


class Box(NamedTuple):
    """Describe a part of a tensor: the offset of its first element, and its shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of_whole(cls, shape: Iterable[int]) -> Self:
        """Make the box of a whole tensor."""
        sizes = tuple(shape)
        return cls((0,) * len(sizes), sizes)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Return the slices of this box in a tensor that holds ``outer``."""
        return tuple(
            slice(a - b, a - b + n) for a, b, n in zip(self.offset, outer.offset, self.shape, strict=True)
        )

    def __and__(self, other: "Box") -> "Box | None":
        """Intersect two boxes; None where no element is in both.

        >>> Box((0, 0), (2, 4)) & Box((1, 2), (5, 5)), Box((0,), (2,)) & Box((2,), (1,))
        (Box(offset=(1, 2), shape=(1, 2)), None)
        """
        starts = tuple(map(max, self.offset, other.offset))
        ends = (min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True))
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, shape) if all(size > 0 for size in shape) else None


class StoredPart(NamedTuple):
    """Place a box of a tensor in a file; ``digest`` is that of its bytes (``tensor_file.py``) or None."""

    box: Box
    file: str
    digest: str | None


class Stored(NamedTuple):
    """Describe a tensor in files: dtype and shape of the whole, and parts that hold each element once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]


class Contents(NamedTuple):
    """List the tensors and values of a folder.

    Args:
        folder: with the files.
        tensors, values: by name.
        files: by name, size in bytes and SHA-256 of the header.
        step: None for files under a model's own names.
        run: the id of the run, None for none.
        objects: names of what is stored as a pickle, and never read.
    """

    folder: Path
    tensors: Mapping[str, Stored]
    values: Mapping[str, Value]
    files: Mapping[str, tuple[int, str]]
    step: int | None
    run: str | None = None
    objects: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Compute the SHA-256 of all but the folder; a copy in another folder has the same."""
        return hashlib.sha256(repr(self[1:]).encode()).hexdigest()


def file_name(rank: int, ranks: int) -> str:
    """Name the file of a rank.

    >>> file_name(0, 2)
    '00001-of-00002.safetensors'
    """
    return f"{rank + 1:05}-of-{ranks:05}.safetensors"


def manifest_text(contents: Contents, save: str) -> bytes:
    """Write the text of the manifest.

    Args:
        save: names the save, in the manifest and in the header of every file.
    """
    tensors = {
        name: {
            "dtype": dtype_name(stored.dtype),
            "shape": stored.shape,
            "parts": [
                {**part.box._asdict(), "file": part.file, "digest": part.digest} for part in stored.parts
            ],
        }
        for name, stored in contents.tensors.items()
    }
    files = {name: {"size": size, "header_sha256": header} for name, (size, header) in contents.files.items()}
    values = {
        name: {"float": value.hex()} if type(value) is float else value
        for name, value in contents.values.items()
    }
    text = signed(
        {
            "format": _FORMAT,
            "version": _VERSION,
            "step": contents.step,
            "run": contents.run,
            "save": save,
            "files": files,
            "tensors": tensors,
            "values": values,
        }
    )
    require_readable(text, _MOST, MANIFEST)
    return text


def signed(content: Any) -> bytes:
    """Write JSON in a canonical form (sorted keys, no spaces), followed by its digest."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f'{{"content":{text},"sha256":"{hashlib.sha256(text.encode()).hexdigest()}"}}\n'.encode()


def read_manifest(folder: Path) -> Contents:
    """Read the manifest of a checkpoint, and check it: its digest is right, every tensor is covered once.

    Raises:
        CheckpointError: it is lost, damaged or foreign.
    """
    text, where = read_plain(folder, MANIFEST, _MOST), f"{folder.name}/{MANIFEST}"
    signed_content = read_json(text, where)
    try:
        content = signed_content["content"]
        if text != signed(content):
            raise ValueError("its digest is another than that of its content")
        if content["format"] != _FORMAT or content["version"] != _VERSION:
            got = f"{escaped(content['format'])}, version {escaped(content['version'])}"
            raise ValueError(f"got the format {got}, expected {_FORMAT!r}, version {_VERSION}")
        files = {name: (file["size"], file["header_sha256"]) for name, file in content["files"].items()}
        if outside := [name for name in files if Path(name).name != name]:
            raise ValueError(f"the file {escaped(outside[0])} is outside of the folder")
        tensors = {name: _stored(name, entry, files) for name, entry in content["tensors"].items()}
        values = {
            name: float.fromhex(value["float"]) if type(value) is dict else value
            for name, value in content["values"].items()
        }
        return Contents(folder, tensors, values, files, content["step"], content["run"])
    except KeyError as error:
        problem = f"it has no {escaped(error.args[0])}"
    # Malformed numbers may overflow.
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        problem = str(error)[:500]
    raise CheckpointError(f"{escaped(where)} is damaged or foreign: {problem}")


def _stored(name: str, entry: Any, files: Mapping[str, Any]) -> Stored:
    parts = []
    for part in entry["parts"]:
        if part["file"] not in files:
            raise ValueError(f"tensor {escaped(name)} is in {escaped(part['file'])}, no file of the folder")
        box = Box(tuple(part["offset"]), tuple(part["shape"]))
        parts.append(StoredPart(box, part["file"], str(part["digest"])))
    shape = tuple(entry["shape"])
    require_tiled([part.box for part in parts], shape, f"tensor {escaped(name)}")
    return Stored(DTYPES_BY_NAME[entry["dtype"]], shape, tuple(parts))


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
    """Raise ValueError unless every element of a tensor is in exactly one box."""
    whole, count = Box.of_whole(shape), 0
    open_: list[Box] = []  # those that may overlap the next one, whose offsets are not smaller
    for box in sorted(box for box in boxes if box.numel):
        if len(box.offset) != len(whole.shape) or (box & whole) != box:
            raise ValueError(f"{name} of shape {list(shape)} has the part {_shown(box)}, which leaves it")
        open_ = [o for o in open_ if not o.shape or o.offset[0] + o.shape[0] > box.offset[0]]
        if other := next((o for o in open_ if o & box), None):
            raise ValueError(f"{name} has the parts {_shown(other)} and {_shown(box)}, which overlap")
        open_.append(box)
        count += box.numel
    if count != whole.numel:
        raise ValueError(f"{name} of shape {list(shape)} has parts for {count} of {whole.numel} elements")


def _shown(box: Box) -> str:
    return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(*box, strict=True)) + "]"
