"""Write and open folders of other libraries: safetensors of Hugging Face, ``torch.distributed.checkpoint``.

The folders of ``torch.distributed.checkpoint`` (DCP), as torchtitan and FSDP have them, are made of pickles,
which run code where they are read as torch reads them. Here is what is trusted instead:

====================  =================================================================================
``.metadata``         read with records in place of its classes: no class of torch is made or changed
items of tensors      ``torch.load(weights_only=True)``, and only a plain tensor of the form promised
items of objects      nothing: they are never read
====================  =================================================================================
"""

import io
import json
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ppfunc._checks import naming_arguments, require_type, shown

from ..optim._torch import place_in_file
from ..update.state import DTYPES, TrainState
from .naming import Names, escaped, listed, named_leaves
from .peers import CheckpointError, Group, Peers
from .saving import Leaves, Work, agree, publish, write
from .storage import (
    Box,
    Contents,
    Part,
    Reader,
    Stored,
    new_file,
    on_host,
    open_plain,
    read_plain,
    require_tiled,
    title,
    write_at,
    write_tensors,
)

ONE, INDEX, METADATA = "model.safetensors", "model.safetensors.index.json", ".metadata"
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors", re.ASCII)


@naming_arguments
def export(
    folder: str | Path, params: Any, names: Names = None, *, most: int = 5 * 10**9, group: Group = None
) -> Path:
    """Write parameters as safetensors files under the model's own names, as Hugging Face does: transformers
    and others read them.

    All ranks call it; tensors that lie over a mesh are gathered one after the other, and each rank writes
    files of its own. The folder appears when it is complete and flushed.

    Args:
        folder: a new one; other files, such as ``config.json``, are written into it afterwards.
        params: ``{stage: tree}`` of this process, or any other tree of tensors, taken as they are: take those
            of the state that the last step returned, since a step with ``donate=True`` writes into the
            tensors of the state before, and where it fails leaves them half updated.
        names: see :func:`ppfunc.checkpoint.save`; a name without them has the number of its stage.
        most: bytes of a file; a larger tensor has one of its own.
        group: see :func:`ppfunc.checkpoint.save`.

    Returns:
        The folder, with ``model.safetensors``, or with ``model-00001-of-00002.safetensors`` and so on and the
        index.

    Raises:
        FileExistsError: the folder is there, and not empty.
        OSError: the disk is full, or does not work.
        TypeError, ValueError: a leaf that is no tensor, no tensor at all, or tensors that do not fit
            together; names them.

    >>> import tempfile
    >>> from safetensors.torch import load_file
    >>> with tempfile.TemporaryDirectory() as root:
    ...     names = {0: {"w": "layers.0.weight"}}
    ...     load_file(export(f"{root}/new", {0: {"w": torch.ones(2)}}, names) / "model.safetensors")
    {'layers.0.weight': tensor([1., 1.])}
    """
    if type(most) is not int or most < 1:
        raise ValueError(f"most: got {most!r}, expected a number of bytes")
    if isinstance(params, TrainState):
        raise TypeError("params: got a TrainState, expected its parameters alone: state.params")
    with Peers(group) as peers, ExitStack() as stack:
        work = _begin(peers, stack, folder, params, names, on_host, gathered=True)
        files: list[list[str]] = []
        writer, room, total = "", 0, 0
        for name, stored in sorted(work.contents.tensors.items(), key=lambda item: item[1].parts[0].file):
            if stored.parts[0].file != writer or stored.nbytes > room:
                files.append([])
                writer, room = stored.parts[0].file, most
            files[-1].append(name)
            room, total = room - stored.nbytes, total + stored.nbytes
        titles = [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
        homes = dict(zip(titles if len(files) > 1 else [ONE], files, strict=True))

        def put() -> None:
            for file, held in homes.items():
                if held[0] in work.mine:
                    write_tensors(work.draft / file, {name: work.mine[name] for name in held})

        def commit(_: Sequence[Any]) -> None:
            if len(files) > 1:
                found = {name: file for file, held in homes.items() for name in held}
                index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(found.items()))}
                with new_file(work.draft / INDEX) as file:
                    write_at(file, (json.dumps(index, indent=2) + "\n").encode())
            publish(work)

        return write(peers, work, put, commit)


@naming_arguments
def to_dcp(folder: str | Path, params: Any, names: Names = None, *, group: Group = None) -> Path:
    """Write tensors as a folder that ``torch.distributed.checkpoint.load`` reads, under plain names.

    All ranks call it, on a disk that they share. Each element is written once, by a rank that holds it. The
    folder appears when it is complete and flushed.

    Args:
        folder: a new one.
        params: ``{stage: tree}`` of this process, or any other tree of tensors.
        names: see :func:`ppfunc.checkpoint.save`; a name without them has the number of its stage.
        group: see :func:`ppfunc.checkpoint.save`.

    Returns:
        The folder.

    Raises:
        FileExistsError: the folder is there, and not empty.
        OSError: the disk is full, or does not work.
        TypeError, ValueError: a leaf that is no tensor, no tensor at all, or tensors that do not fit
            together; names them.
    """
    with Peers(group) as peers, ExitStack() as stack:
        work = _begin(peers, stack, folder, params, names, lambda part: part)

        def put() -> dict[str, tuple[str, int, int]]:
            places: dict[str, tuple[str, int, int]] = {}
            path, at = work.draft / f"__{peers.rank}_0.distcp", 0
            with new_file(path) as file:
                for name, tensor in work.mine.items():
                    buffer = io.BytesIO()
                    torch.save(on_host(tensor).clone(), buffer)  # not a view, with all of its memory
                    write_at(file, buffer.getbuffer(), at)
                    places[name] = path.name, at, len(buffer.getbuffer())
                    at += len(buffer.getbuffer())
            return places

        def commit(records: Sequence[Any]) -> None:
            with new_file(work.draft / METADATA) as file:
                write_at(file, _metadata(work.contents, records))
            publish(work)

        return write(peers, work, put, commit)


def _begin(
    peers: Peers,
    stack: ExitStack,
    folder: str | Path,
    params: Any,
    names: Names,
    copy: Callable[[Tensor], Tensor],
    gathered: bool = False,
) -> Work:
    require_type("folder", folder, str | PathLike, "a path first, then the parameters")
    target = Path(folder).absolute()

    def look() -> tuple[Path, Leaves, dict[str, Any]]:
        leaves = named_leaves(params, names, "params")[0]
        for name, leaf in leaves:
            if not isinstance(leaf, Tensor):
                got = f"{escaped(name)} is no tensor; leave it out" if name else f"got {shown(leaf)}"
                raise TypeError(f"params: {got}; expected tensors, such as state.params")
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise FileExistsError(f"{target} is there; give another folder, or delete it")
        return target, leaves, {}

    work = agree(peers, stack, look, copy, gathered)
    if not work.contents.tensors:
        raise ValueError("params: got no tensor, on any rank; expected {stage: tree}, such as split.params")
    return work


def _metadata(contents: Contents, records: Sequence[Any]) -> bytes:
    """Describe the items of all ranks in the classes that DCP reads."""
    from torch.distributed.checkpoint import metadata as dcp  # here, because the import takes long

    tensors: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for name, stored in contents.tensors.items():
        chunks = [dcp.ChunkStorageMetadata(*map(torch.Size, part.box)) for part in stored.parts]
        tensors[name] = dcp.TensorStorageMetadata(
            dcp.TensorProperties(stored.dtype), torch.Size(stored.shape), chunks
        )
        for n, part in enumerate(stored.parts):
            place = records[int(part.file[:5]) - 1][name]
            places[dcp.MetadataIndex(name, part.box.offset, n)] = place_in_file(*place)
    paths = {name: (name,) for name in tensors}
    return pickle.dumps(dcp.Metadata(tensors, paths, places, dcp.StorageMeta()))


# -- a model of Hugging Face


def holds_model_files(folder: Path) -> bool:
    """Tell whether a folder has a model's weights as Hugging Face lays them out."""
    return any((folder / name).exists() for name in (INDEX, ONE))


def open_model_files(folder: Path) -> tuple[Contents, Reader]:
    """Find the tensors of such a folder, which has no digests, and make the function that reads them.

    Raises:
        CheckpointError: the index and the files do not have the same tensors, or a name leaves the folder.
    """
    tensors: dict[str, Stored] = {}
    homes = {"": ONE}
    if indexed := (folder / INDEX).exists():
        try:
            homes = json.loads(read_plain(folder / INDEX))["weight_map"]
            if not all(_FILE.fullmatch(file) for file in homes.values()):
                raise ValueError
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise CheckpointError(
                f"{title(folder / INDEX)} has no weight_map from names to files beside it"
            ) from None
    for name in sorted(set(homes.values())):
        with _opened(folder / name) as file:
            known = {tensor for tensor, home in homes.items() if home == name}
            if indexed and (odd := known ^ set(file.keys())):
                raise CheckpointError(
                    f"{title(folder / name)} and the index do not have the same tensors: {listed(odd)}"
                )
            for tensor in file.keys():  # noqa: SIM118, a file is no mapping
                piece = file.get_slice(tensor)
                box = Box.of_whole(piece.get_shape())
                tensors[tensor] = Stored(DTYPES[piece.get_dtype()], box.shape, (Part(box, name),))

    def read(name: str, part: Part, into: Tensor | None) -> None:
        with _opened(folder / part.file) as file:
            if into is not None:
                into.copy_(file.get_tensor(name))

    return Contents(tensors), read


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    with open_plain(path):  # not a pipe, which would be waited for
        try:
            with safe_open(path, "pt", "cpu") as file:
                yield file
        except (SafetensorError, KeyError) as error:
            raise CheckpointError(
                f"{title(path)} is no safetensors file that can be read: {escaped(error)}"
            ) from None


# -- torch.distributed.checkpoint

_RECORDS = {
    "torch.distributed.checkpoint.metadata.Metadata",
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
    "torch.distributed.checkpoint.metadata.TensorProperties",
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.metadata.StorageMeta",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
}


class _Record:
    """Stands for an object of a class of DCP, and keeps the state that a pickle gives the object.

    A pickle can set attributes of a class that has no ``__setstate__``: of this one it cannot.
    """

    state: Any = None

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Dictionary(dict[Any, Any]):
    """Takes the keys that DCP writes: a tuple of tuples may take for ever to hash."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if type(key) not in (str, _Record):
            raise ValueError(f"it has a key of type {type(key).__name__}, which DCP does not write there")
        super().__setitem__(key, value)


class _Unpickler(pickle._Unpickler):
    """Reads a pickle in Python, where keys are checked before they are hashed; sets are not read."""

    dispatch: ClassVar[dict[int, Any]] = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if code not in (pickle.DICT[0], pickle.ADDITEMS[0], pickle.FROZENSET[0], pickle.BYTEARRAY8[0])
    }
    dispatch[pickle.EMPTY_DICT[0]] = lambda unpickler: unpickler.stack.append(_Dictionary())

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for a class that the pickle names; raise for a name that DCP does not write."""
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if (module, name) == ("torch", "Size"):
            return tuple
        if f"{module}.{name}" in _RECORDS:
            return _Record
        raise ValueError(f"it names {escaped(f'{module}.{name}')}, which DCP does not write there")


def open_dcp(folder: Path) -> tuple[Contents, Reader]:
    """Read ``.metadata``, and check that the items of a tensor hold each element once.

    Raises:
        CheckpointError: it is lost, damaged or foreign.
    """
    text = read_plain(folder / METADATA)
    tensors: dict[str, Stored] = {}
    places: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
    objects: list[str] = []
    try:
        content = _Unpickler(io.BytesIO(text)).load().state
        for index, place in content["storage_data"].items():
            name, file = index.state["fqn"], place.state["relative_path"]
            if type(name) is not str or type(file) is not str or Path(file).name != file:
                raise ValueError("it has an item whose name is no text, or which is in no file of the folder")
            offset = _sizes(index.state.get("offset") or ())
            begin, size = _sizes((place.state["offset"], place.state["length"]))
            places[name, offset] = file, begin, size
        for name, entry in content["state_dict_metadata"].items():
            if entry.state is None:
                objects.append(str(name))
                continue
            (dtype, *_), shape = entry.state["properties"].state, _sizes(entry.state["size"])
            boxes = [
                Box(_sizes(chunk.state["offsets"]), _sizes(chunk.state["sizes"]))
                for chunk in entry.state["chunks"]
            ]
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"tensor {escaped(name)} has no torch.dtype")
            require_tiled(boxes, shape, f"tensor {escaped(name)}")
            parts = tuple(Part(box, *places[name, box.offset]) for box in boxes)
            tensors[name] = Stored(dtype, shape, parts)
    except Exception as error:  # foreign bytes make pickle raise nearly anything
        raise CheckpointError(
            f"{title(folder / METADATA)} is damaged or foreign: {type(error).__name__}: {str(error)[:500]}"
        ) from None

    def read(name: str, part: Part, into: Tensor | None) -> None:
        path, expected = folder / part.file, Stored(tensors[name].dtype, part.box.shape)
        data = io.BytesIO(read_plain(path, part.begin, part.size))
        try:
            tensor = torch.load(data, map_location="cpu", weights_only=True)
        except Exception as error:  # foreign bytes make torch raise nearly anything
            raise CheckpointError(
                f"{title(path)} has no tensor that can be read as {escaped(name)}: {str(error)[:500]}"
            ) from None
        plain = type(tensor) is Tensor and tensor.layout is torch.strided
        got = str(Stored(tensor.dtype, tuple(tensor.shape))) if plain else type(tensor).__name__
        if got != str(expected):
            raise CheckpointError(f"{title(path)} has {got} as tensor {escaped(name)}, expected {expected}")
        if into is not None:
            into.copy_(tensor)

    return Contents(tensors, objects=tuple(sorted(objects))), read


def _sizes(sizes: Any) -> tuple[int, ...]:
    """Return sizes, offsets or places in a file; raise ValueError for anything but whole numbers."""
    if type(sizes) is not tuple or not all(type(n) is int and 0 <= n < 2**63 for n in sizes):
        raise ValueError("it has sizes or offsets that are no whole numbers")
    return sizes
