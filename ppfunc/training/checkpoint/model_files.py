"""Write and find safetensors files under a model's own names, with an index, as Hugging Face has them."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppfunc.stage.layout import whole

from .boxes import Box
from .errors import CheckpointError, listed, shown
from .folders import flush_folder
from .manifest import Contents, Stored, StoredPart
from .naming import Leaf, Names, named_leaves
from .peers import Group, Peers
from .saving import bits_of, forms_of, plan_of, require_same
from .tensor_file import TensorFile, on_host, read_json, read_plain, write_tensors

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors", re.ASCII)
_MOST_INDEX = 2**28  # bytes


def export(folder: str | Path, params: Any, names: Names = None, *, most: int = 5 * 10**9, group: Group = None) -> Path:
    """Write parameters as safetensors files under the model's own names, as Hugging Face does: transformers and others read them.

    All ranks call it; tensors that lie over a mesh are gathered one after the other, and each rank writes files of its own.

    Args:
        folder: may have other files, such as ``config.json``.
        params: ``{stage: tree}`` of this process, or any other tree of tensors.
        names: see :func:`ppfunc.save`; a name without them has the number of its stage.
        most: bytes of a file; a larger tensor has one of its own.
        group: see :func:`ppfunc.save`.

    Returns:
        The folder, with ``model.safetensors``, or with ``model-00001-of-00002.safetensors`` and so on and the index, which is written last.

    Raises:
        FileExistsError: the folder has weights.
        TypeError, ValueError: a leaf that is no tensor, or tensors that do not fit together; names them.

    >>> import tempfile
    >>> from safetensors.torch import load_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     names = {0: {"w": "layers.0.weight"}}
    ...     load_file(export(folder, {0: {"w": torch.ones(2)}}, names) / "model.safetensors")
    {'layers.0.weight': tensor([1., 1.])}
    """
    root = Path(folder).absolute()
    if type(most) is not int or most < 1:
        raise ValueError(f"most: got {most!r}, expected a number of bytes")
    with Peers(group) as peers:
        leaves: list[tuple[str, Leaf]] = []

        def look() -> dict[str, Any]:
            leaves.extend(named_leaves(params, names, "params")[0])
            if bad := [name for name, leaf in leaves if not isinstance(leaf, Tensor)]:
                raise TypeError(f"params: {listed(bad)} is no tensor")
            root.mkdir(parents=True, exist_ok=True)
            if there := [entry.name for entry in os.scandir(root) if entry.name == INDEX or _is_weights(entry.name)]:
                raise FileExistsError(f"{root} has weights: {listed(there)}; give another folder, or delete them")
            return {**forms_of(leaves, whole=True), "nonce": secrets.token_hex(8)}

        told = peers.together(look)
        plan, nonce = plan_of(told), told[0]["nonce"]
        owners = {name: rank for (name, _), rank in plan.owners.items()}
        tensors: dict[str, Tensor] = {}

        def put() -> dict[str, Any]:
            sums: list[list[Any]] = []
            with torch.no_grad():
                for name, leaf in leaves:
                    assert isinstance(leaf, Tensor)
                    full = whole(leaf.detach())  # on all ranks: they gather it together
                    if (name, Box.of_whole(leaf.shape)) in plan.shared:
                        sums.append([name, [], bits_of(full)])
                    if owners.get(name, 0) == peers.rank and name not in tensors:
                        tensors[name] = on_host(full)
            return {"files": _files(tensors, most), "bytes": sum(t.nbytes for t in tensors.values()), "sums": sums}

        found = peers.together(put)
        require_same([rank["sums"] for rank in found])
        files = [(rank, own) for rank, one in enumerate(found) for own in one["files"]]
        titles = [ONE] if len(files) == 1 else [f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))]
        temporary = [root / f".{title}.{nonce}" for title in titles]

        def write() -> None:
            for (rank, own), path in zip(files, temporary, strict=True):
                if rank == peers.rank:
                    write_tensors(path, {name: tensors[name] for name in own}, {"format": "pt"})

        try:
            peers.together(write)
            size = sum(one["bytes"] for one in found)
            peers.together(lambda: _publish(root, files, titles, temporary, size) if peers.rank == 0 else None)
        finally:
            for (rank, _), path in zip(files, temporary, strict=True):
                if rank == peers.rank:
                    path.unlink(missing_ok=True)
    return root


def _is_weights(name: str) -> bool:
    return name == ONE or re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name) is not None


def _files(tensors: dict[str, Tensor], most: int) -> list[list[str]]:
    """Names in files of at most so many bytes."""
    files: list[list[str]] = []
    room = 0
    for name, tensor in tensors.items():
        if not files or tensor.nbytes > room:
            files.append([])
            room = most
        files[-1].append(name)
        room -= tensor.nbytes
    return files


def _publish(root: Path, files: Sequence[tuple[int, Sequence[str]]], titles: Sequence[str], temporary: Sequence[Path], size: int) -> None:
    """Give the files their names, and write the index in the end."""
    for path, title in zip(temporary, titles, strict=True):
        os.rename(path, root / title)
    if len(titles) > 1:
        weight_map = {name: title for (_, names), title in zip(files, titles, strict=True) for name in names}
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}, indent=2) + "\n"
        flush_folder(root)
        draft = temporary[0].with_name(f"{temporary[0].name}.index")
        with open(draft, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.rename(draft, root / INDEX)
    flush_folder(root)


def holds_model_files(folder: Path) -> bool:
    """Whether a folder has a model's weights as Hugging Face lays them out."""
    return any((folder / name).exists() for name in (INDEX, ONE))


def open_model_files(folder: Path) -> Contents:
    """The tensors of such a folder; nobody has noted digests.

    Raises:
        CheckpointError: the index and the files do not have the same tensors, or a name leaves the folder.
    """
    weight_map = None
    if (folder / INDEX).exists():
        weight_map = read_json(read_plain(folder, INDEX, _MOST_INDEX), f"{folder.name}/{INDEX}").get("weight_map")
        if type(weight_map) is not dict or not all(type(file) is str and _FILE.fullmatch(file) for file in weight_map.values()):
            raise CheckpointError(f"{shown(f'{folder.name}/{INDEX}')} has no weight_map from names to files beside it")
    tensors: dict[str, Stored] = {}
    files: dict[str, tuple[int, str | None]] = {}
    for file_name in sorted(set(weight_map.values())) if weight_map is not None else [ONE]:
        with TensorFile(folder, file_name) as file:
            files[file_name] = file.size, file.header
            expected = file.spans.keys() if weight_map is None else {name for name, home in weight_map.items() if home == file_name}
            if odd := file.spans.keys() ^ expected:
                raise CheckpointError(f"{shown(file.name)} and the index do not have the same tensors: {listed(odd)}")
            for name, span in file.spans.items():
                tensors[name] = Stored(span.dtype, span.shape, (StoredPart(Box.of_whole(span.shape), file_name, None),))
    return Contents(folder, tensors, {}, files, None)
