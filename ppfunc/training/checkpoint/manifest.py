"""Write down what a checkpoint holds, and read it again: ``manifest.json``, which is the sign that a checkpoint is whole."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .boxes import Box, require_tiled
from .errors import CheckpointError, escaped
from .tensor_file import DTYPES_BY_NAME, dtype_name, is_sizes, read_json, read_plain

MANIFEST = "manifest.json"
_FORMAT, _VERSION = "ppfunc checkpoint", 2
_MOST = 2**28  # bytes
_FILE = re.compile(r"\d{5}-of-\d{5}\.safetensors", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)

Value = bool | int | float | str


class StoredPart(NamedTuple):
    """A part of a tensor in a file; ``digest`` is that of its bytes (``tensor_file.py``), None where nobody has noted it."""

    box: Box
    file: str
    digest: str | None


class Stored(NamedTuple):
    """A tensor, as files hold it.

    Args:
        dtype, shape: of the whole.
        parts: each element is in one of them.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]


class NamedPart(NamedTuple):
    """A part of a tensor with what is needed to read it: the name and the dtype of the tensor."""

    name: str
    dtype: torch.dtype
    part: StoredPart


class Contents(NamedTuple):
    """The tensors and values of a folder.

    Args:
        folder: with the files.
        tensors, values: by name.
        files: by name, size in bytes and SHA-256 of the header, None where nobody has noted it.
        step: None where it has none.
    """

    folder: Path
    tensors: Mapping[str, Stored]
    values: Mapping[str, Value]
    files: Mapping[str, tuple[int, str | None]]
    step: int | None

    def parts(self) -> Iterator[NamedPart]:
        """List all parts of all tensors."""
        return (NamedPart(name, stored.dtype, part) for name, stored in self.tensors.items() for part in stored.parts)

    @property
    def digest(self) -> str:
        """SHA-256 of all but the folder; the same for a copy in another."""
        return hashlib.sha256(repr(self[1:]).encode()).hexdigest()


def file_name(rank: int, ranks: int) -> str:
    """Name the file of a rank.

    >>> file_name(0, 2)
    '00001-of-00002.safetensors'
    """
    return f"{rank + 1:05}-of-{ranks:05}.safetensors"


def manifest_text(contents: Contents, save: str, grid: Mapping[str, int]) -> bytes:
    """Write the text of the manifest.

    Args:
        save: names the save, in the manifest and in the header of every file.
        grid: sizes of the axes of the mesh that has saved; for people.
    """
    tensors = {
        name: {
            "dtype": dtype_name(t.dtype),
            "shape": list(t.shape),
            "parts": [{"offset": list(p.box.offset), "shape": list(p.box.shape), "file": p.file, "digest": p.digest} for p in t.parts],
        }
        for name, t in contents.tensors.items()
    }
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "step": contents.step,
        "save": save,
        "grid": dict(grid),
        "files": {name: {"size": size, "header_sha256": header} for name, (size, header) in contents.files.items()},
        "tensors": tensors,
        "values": {name: {"float": value.hex()} if type(value) is float else value for name, value in contents.values.items()},
    }
    text = _with_digest(content)
    if len(text) > _MOST:
        raise ValueError(f"{MANIFEST} takes {len(text)} bytes, expected at most {_MOST}; save fewer, larger tensors")
    return text


def _with_digest(content: Any) -> bytes:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f'{{"content":{text},"sha256":"{hashlib.sha256(text.encode()).hexdigest()}"}}\n'.encode()


def read_manifest(folder: Path) -> Contents:
    """Read the manifest of a checkpoint, and check it: every tensor is covered once, and no name leaves the folder.

    Raises:
        CheckpointError: it is not there, damaged, or says what cannot be.
    """
    text = read_plain(folder, MANIFEST, _MOST)
    found = read_json(text, f"{folder.name}/{MANIFEST}")
    where = f"{escaped(f'{folder.name}/{MANIFEST}')}"
    try:
        content = found["content"]
        if text != _with_digest(content):
            raise ValueError("its digest is another")
        if content["format"] != _FORMAT or content["version"] != _VERSION:
            got = f"{escaped(content['format'])}, version {escaped(content['version'])}"
            raise ValueError(f"got the format {got}, expected {_FORMAT!r}, version {_VERSION}")
        files = {_file(name): (_number(f["size"]), _digest(f["header_sha256"])) for name, f in content["files"].items()}
        tensors = {name: _stored(name, entry, files) for name, entry in content["tensors"].items()}
        values = {name: _value(name, value) for name, value in content["values"].items()}
        return Contents(folder, tensors, values, files, _number(content["step"]))
    except KeyError as error:
        raise CheckpointError(f"{where} is damaged or foreign: it has no {escaped(error.args[0])}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{where} is damaged or foreign: {str(error)[:500]}") from None


def _stored(name: str, entry: Any, files: Mapping[str, Any]) -> Stored:
    shape = _sizes(entry["shape"])
    parts = tuple(StoredPart(Box(_sizes(p["offset"]), _sizes(p["shape"])), _file(p["file"]), _digest(p["digest"])) for p in entry["parts"])
    if lost := [part.file for part in parts if part.file not in files]:
        raise ValueError(f"tensor {escaped(name)} is in the file {lost[0]}, which is not among the files")
    if len({part.file for part in parts}) < len(parts):
        raise ValueError(f"tensor {escaped(name)} has two parts in one file")
    require_tiled([part.box for part in parts], shape, f"tensor {escaped(name)}")
    return Stored(DTYPES_BY_NAME[entry["dtype"]], shape, parts)


def _value(name: str, value: Any) -> Value:
    if type(value) is dict:
        return float.fromhex(value["float"])
    if type(value) not in (bool, int, str):
        raise ValueError(f"{escaped(name)} is {escaped(value)}")
    return value


def _file(name: Any) -> str:
    if type(name) is not str or not _FILE.fullmatch(name):
        raise ValueError(f"{escaped(name)} is no name of a file of a checkpoint")
    return name


def _digest(text: Any) -> str:
    if type(text) is not str or not _DIGEST.fullmatch(text):
        raise ValueError(f"{escaped(text)} is no digest")
    return text


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{escaped(value)} is no size")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    if not is_sizes(value):
        raise ValueError(f"{escaped(value)} is no list of sizes")
    return tuple(value)
