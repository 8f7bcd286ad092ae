"""Read and write folders of ``torch.distributed.checkpoint`` (DCP), as torchtitan and FSDP have them.

Such a folder is made of pickles, which run code where they are read as torch reads them. Here is what is
trusted instead:

====================  =================================================================================
``.metadata``         read with records in place of its classes: no class of torch is made or changed
items of tensors      ``torch.load(weights_only=True)``, and only a plain tensor of the form promised
items of objects      nothing: they are never read
====================  =================================================================================
"""

import io
import os
import pickle
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ppfunc._checks import naming_arguments
from ppfunc.stage.layout import local
from ppfunc.stage.process import hold_interrupts

from .._torch import place_in_file
from .errors import CheckpointError, escaped
from .folders import PartToRead, draft, flush_folder, writing
from .loading import Reader, load_tree
from .manifest import Box, Contents, Stored, StoredPart, box_of, file_name, require_tiled
from .naming import Names, named_leaves
from .peers import Group, Peers
from .saving import forms_of, plan_of, require_same, take_parts
from .tensor_file import dtype_name, is_sizes, new_file, on_host, open_plain, read_at, read_plain, write_at
from .threads import in_threads

_METADATA = ".metadata"
_MOST = 2**28  # bytes
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


@naming_arguments
def from_dcp(
    folder: str | Path, like: Any, *, names: Names = None, group: Group = None, partial: str | None = None
) -> Any:
    """Load tensors from a folder of ``torch.distributed.checkpoint``, as torchtitan and FSDP write them.

    All ranks call it, on any grid, and each reads what it holds. If it raises, it raises on all ranks. No
    code in the folder is run: Python objects in it, such as torchtitan's ``train_state``, are never read,
    and ``.metadata`` may name nothing but what DCP writes there. There are no digests.

    Args:
        folder: with the file ``.metadata``.
        like: ``{stage: tree}`` of this process, such as ``split.params``, or any other tree of tensors. Its
            names, shapes and dtypes have to be those of the folder, all of them; layouts and devices are its
            own.
        names: see :func:`ppfunc.checkpoint.save`; with a prefix, a function:
            ``lambda stage, leaf: f"model.{leaf}"``. Moments of AdamW are trees like the parameters:
            ``lambda stage, leaf: f"optimizer.state.{leaf}.exp_avg"``.
        group: see :func:`ppfunc.checkpoint.save`.
        partial: see :func:`ppfunc.checkpoint.load`; an object that is left out needs a pattern as well.

    Returns:
        The tree, of new tensors, with the structure and the layouts of ``like``.

    Raises:
        CheckpointError: the folder is damaged or foreign, or names what DCP does not write.
        ValueError: names, shapes or dtypes of ``like`` are not those of the folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     folder = to_dcp(f"{root}/new", {0: {"w": torch.ones(2)}}, {0: {"w": "layers.0.weight"}})
    ...     from_dcp(folder, {"layers.0.weight": torch.zeros(2)})
    {'layers.0.weight': tensor([1., 1.])}
    """
    with Peers(group) as peers:
        return load_tree(peers, Path(folder).absolute(), like, names, None, partial, _open)


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
        TypeError, ValueError: a leaf that is no tensor, or tensors that do not fit together; names them.
    """
    target = Path(folder).absolute()
    leaves: list[tuple[str, torch.Tensor]] = []
    with Peers(group) as peers, ExitStack() as stack:

        def look() -> dict[str, Any]:
            for name, leaf in named_leaves(params, names, "params")[0]:
                if not isinstance(leaf, torch.Tensor):
                    raise TypeError(
                        f"params: {escaped(name)} is no tensor, and would be a pickle; leave it out"
                    )
                leaves.append((name, leaf))
            if target.exists() and (not target.is_dir() or any(target.iterdir())):
                raise FileExistsError(f"{target} is there; give another folder, or delete it")
            nonce = stack.enter_context(draft(target)) if peers.rank == 0 else ""
            return {"forms": forms_of(leaves), "nonce": nonce}

        answers = peers.together(look)
        plan, shared = plan_of(target, None, [answer["forms"] for answer in answers])
        path = writing(target, answers[0]["nonce"])

        def write() -> dict[str, Any]:
            parts = ((name, box_of(leaf, name), local(leaf)) for name, leaf in leaves)
            mine, sums = take_parts(peers, parts, plan, shared, lambda name, part: part)
            return {"items": _write_items(path / _title(peers.rank), mine) if mine else {}, "sums": sums}

        written = peers.together(write)

        def publish() -> None:
            if peers.rank == 0:
                require_same([answer["sums"] for answer in written])
                with new_file(path / _METADATA) as file:
                    write_at(file, _metadata(plan, [answer["items"] for answer in written]), 0)
                flush_folder(path)
                os.rename(path, target)
                flush_folder(target.parent)

        with hold_interrupts():  # what one rank has committed is there for all
            peers.together(publish)
    return target


def _title(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _write_items(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Write tensors into a file, each as ``torch.save`` has it; return where each begins, and its bytes."""
    items: dict[str, tuple[int, int]] = {}
    at = 0
    with new_file(path) as file:
        for name, tensor in tensors.items():
            buffer = io.BytesIO()
            torch.save(on_host(tensor).clone(), buffer)  # a view would be saved with all of its memory
            write_at(file, buffer.getbuffer(), at)
            items[name] = at, len(buffer.getbuffer())
            at += len(buffer.getbuffer())
    return items


def _metadata(plan: Contents, items: Sequence[Mapping[str, Sequence[int]]]) -> bytes:
    """Describe the items of all ranks in the classes that DCP reads."""
    from torch.distributed.checkpoint import metadata as dcp  # here, because the import takes long

    writers = {file_name(rank, len(items)): rank for rank in range(len(items))}
    tensors: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for name, stored in plan.tensors.items():
        chunks = [dcp.ChunkStorageMetadata(*map(torch.Size, part.box)) for part in stored.parts]
        tensors[name] = dcp.TensorStorageMetadata(
            dcp.TensorProperties(stored.dtype), torch.Size(stored.shape), chunks
        )
        for n, part in enumerate(stored.parts):
            rank = writers[part.file]
            places[dcp.MetadataIndex(name, part.box.offset, n)] = place_in_file(
                _title(rank), *items[rank][name]
            )
    paths = {name: (name,) for name in tensors}
    return pickle.dumps(dcp.Metadata(tensors, paths, places, dcp.StorageMeta()))


class _Record:
    """Stands for an object of a class that ``.metadata`` may name, and has what the pickle would set in it.

    A pickle can set attributes of a class that has no ``__setstate__``: of this one it cannot.
    """

    state: Any = None

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for the class that the pickle names; raise for one that DCP does not write."""
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if (module, name) == ("torch", "Size"):
            return tuple
        if f"{module}.{name}" in _RECORDS:
            return _Record
        raise ValueError(f"it names {escaped(f'{module}.{name}')}, which DCP does not write there")


def _open(folder: Path) -> tuple[Contents, Reader]:
    """Read ``.metadata``, and check that every element of every tensor is in one item.

    Raises:
        CheckpointError: it is lost, damaged or foreign.
    """
    text = read_plain(folder, _METADATA, _MOST)
    tensors: dict[str, Stored] = {}
    places: dict[Any, Mapping[str, Any]] = {}
    objects: list[str] = []
    try:
        content = _Unpickler(io.BytesIO(text)).load().state
        keys = [(key.state["fqn"], key.state.get("offset")) for key in content["storage_data"]]
        names = [*content["state_dict_metadata"], *(name for name, _ in keys)]
        # Others may take for ever to hash, or to write.
        if not all(type(n) is str for n in names) or not all(is_sizes([*(at or ())]) for _, at in keys):
            raise ValueError("it has items whose names are no texts, or whose offsets are no numbers")
        for key, place in zip(keys, content["storage_data"].values(), strict=True):
            places[key] = place.state
        for name, entry in content["state_dict_metadata"].items():
            if entry.state is None:
                objects.append(name)
            else:
                tensors[name] = _stored(name, entry.state, places)
    except Exception as error:  # foreign bytes make pickle raise nearly anything
        raise CheckpointError(
            f"{escaped(f'{folder.name}/{_METADATA}')} is damaged or foreign: {type(error).__name__}:"
            f" {str(error)[:500]}"
        ) from None

    def read(task: PartToRead) -> None:
        box = task.part.box
        tensor = _read_item(folder, task, tensors[task.name].dtype, places[task.name, box.offset])
        if task.into is not None and (shared := box & task.box):
            task.into[shared.within(task.box)] = tensor[shared.within(box)].to(task.into.device)

    contents = Contents(folder, tensors, {}, {}, None, objects=tuple(sorted(objects)))
    return contents, lambda parts: in_threads(read, parts)


def _stored(name: str, entry: Mapping[str, Any], places: Mapping[Any, Mapping[str, Any]]) -> Stored:
    """Check the description of a tensor, and where its parts are."""
    dtype, shape = entry["properties"].state[0], entry["size"]
    boxes = [Box(chunk.state["offsets"], chunk.state["sizes"]) for chunk in entry["chunks"]]
    sizes = [shape, *(box.offset for box in boxes), *(box.shape for box in boxes)]
    if not isinstance(dtype, torch.dtype) or not all(is_sizes(list(size)) for size in sizes):
        raise ValueError(
            f"tensor {escaped(name)} has the dtype {escaped(dtype)} and sizes {escaped(sizes)}, expected a"
            " torch.dtype and whole numbers"
        )
    parts = []
    for box in boxes:
        place = places[name, box.offset]
        file = place["relative_path"]
        if Path(file).name != file or not is_sizes([place["offset"], place["length"]]):
            raise ValueError(
                f"tensor {escaped(name)} is at {escaped(place)}, which is no place in the folder"
            )
        if place.get("transform_descriptors"):
            raise ValueError(
                f"tensor {escaped(name)} is compressed, expected plain bytes; save it without extensions"
            )
        parts.append(StoredPart(box, file, None))
    require_tiled(boxes, shape, f"tensor {escaped(name)}")
    return Stored(dtype, shape, tuple(parts))


def _read_item(folder: Path, task: PartToRead, dtype: torch.dtype, place: Mapping[str, Any]) -> torch.Tensor:
    """Read the part of a tensor that an item holds.

    Raises:
        CheckpointError: the file is cut, or the item is not the tensor that ``.metadata`` promises.
    """
    box, file_title, _ = task.part
    where = f"{folder.name}/{file_title}"
    with open_plain(folder, file_title) as (file, size):
        if size < (end := place["offset"] + place["length"]):
            raise CheckpointError(f"{escaped(where)} is cut: it has {size} bytes, expected {end}")
        data = bytearray(place["length"])
        read_at(file, where, memoryview(data), place["offset"])
    try:
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # foreign bytes make torch raise nearly anything
        raise CheckpointError(
            f"{escaped(where)} has no tensor that can be read as {escaped(task.name)}: {str(error)[:500]}"
        ) from None
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    if not plain or (tensor.dtype, tensor.shape) != (dtype, box.shape):
        got = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}" if plain else type(tensor).__name__
        raise CheckpointError(
            f"{escaped(where)} has {got} as tensor {escaped(task.name)}, expected"
            f" {dtype_name(dtype)}{list(box.shape)}"
        )
    return tensor.detach()
