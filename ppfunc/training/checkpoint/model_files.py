"""Write and find safetensors files under a model's own names, with an index, as Hugging Face has them."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppfunc.stage.layout import whole

from ..checksums import checksum
from .boxes import Box
from .errors import CheckpointError, escaped, listed
from .folders import flush_folder, make_folder
from .manifest import Contents, Stored, StoredPart
from .naming import Names, named_leaves
from .peers import Group, Peers
from .saving import forms_of, plan_of, require_same
from .tensor_file import TensorFile, on_host, read_json, read_plain, write_tensors

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors", re.ASCII)
_MOST_INDEX = 2**28  # bytes


def export(folder: str | Path, params: Any, names: Names = None, *, most: int = 5 * 10**9, group: Group = None) -> Path:
    """Write parameters as safetensors files under the model's own names, as Hugging Face does: transformers and others read them.

    All ranks call it; tensors that lie over a mesh are gathered one after the other, and each rank writes files of its own.

    Args:
        folder: may have other files, such as ``config.json``.
        params: ``{stage: tree}`` of this process, or any other tree of tensors, taken as they are: take those of the state that the last
            step returned, since a step with ``donate=True`` writes into the tensors of the state before, and where it fails leaves them
            half updated.
        names: see :func:`ppfunc.save`; a name without them has the number of its stage.
        most: bytes of a file; a larger tensor has one of its own.
        group: see :func:`ppfunc.save`.

    Returns:
        The folder, with ``model.safetensors``, or with ``model-00001-of-00002.safetensors`` and so on and the index, which is written last.

    Raises:
        FileExistsError: the folder has weights.
        OSError: the disk is full, or does not work; nothing is left of the export.
        TypeError, ValueError: a leaf that is no tensor, no tensor at all, or tensors that do not fit together; names them.

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
        leaves: list[tuple[str, Tensor]] = []

        def look() -> dict[str, Any]:
            leaves.extend(_tensors(params, names))
            return {**forms_of(leaves, whole=True), "nonce": secrets.token_hex(8)}

        told = peers.together(look)
        if not any(rank["tensors"] for rank in told):
            raise ValueError("params: got no tensor, on any rank; expected {stage: tree}, such as split.params")
        peers.together(lambda: _require_no_weights(root))
        tensors: dict[str, Tensor] = {}

        def gather() -> dict[str, Any]:
            sums = _gather(tensors, leaves, told, peers.rank)
            return {"files": _files(tensors, most), "bytes": sum(t.nbytes for t in tensors.values()), "sums": sums}

        found = peers.together(gather)
        require_same([rank["sums"] for rank in found])
        files = _titled([(rank, own) for rank, one in enumerate(found) for own in one["files"]], root, told[0]["nonce"])
        try:
            peers.together(lambda: _write([file for file in files if file.rank == peers.rank], tensors))
            size = sum(one["bytes"] for one in found)
            peers.together(lambda: _publish(root, files, size) if peers.rank == 0 else None)
        finally:
            for file in files:
                if file.rank == peers.rank:
                    file.draft.unlink(missing_ok=True)
    return root


class ModelFile(NamedTuple):
    """A file of an export: the rank that writes it, its tensors, where it is written, and where it goes."""

    rank: int
    tensors: list[str]
    draft: Path
    target: Path


def _tensors(params: Any, names: Names) -> list[tuple[str, Tensor]]:
    """Name the parameters.

    Raises:
        TypeError: a leaf is no tensor.
    """
    leaves = named_leaves(params, names, "params")[0]
    if bad := [name for name, leaf in leaves if not isinstance(leaf, Tensor)]:
        raise TypeError(f"params: {listed(bad)} is no tensor")
    return [(name, leaf) for name, leaf in leaves if isinstance(leaf, Tensor)]


def _require_no_weights(root: Path) -> None:
    """Make the folder, and raise FileExistsError if it has weights."""
    make_folder(root)
    if there := [entry.name for entry in os.scandir(root) if entry.name == INDEX or _is_weights(entry.name)]:
        raise FileExistsError(f"{root} has weights: {listed(there)}; give another folder, or delete them")


@torch.no_grad()
def _gather(into: dict[str, Tensor], leaves: Sequence[tuple[str, Tensor]], told: Sequence[Mapping[str, Any]], rank: int) -> list[list[Any]]:
    """Gather the tensors that this rank writes.

    Returns:
        The checksums of those that others hold, too.
    """
    plan = plan_of(told)
    owners = {name: holder for holder in reversed(range(len(told))) for name, *_ in told[holder]["tensors"]}  # empty ones: the first holder
    owners |= {name: owner for (name, _), owner in plan.owners.items()}
    sums: list[list[Any]] = []
    for name, leaf in leaves:
        full = whole(leaf.detach())  # on all ranks: they gather it together
        if (name, Box.of_whole(leaf.shape)) in plan.shared:
            sums.append([name, [], int(checksum(full))])
        if owners[name] == rank and name not in into:
            into[name] = on_host(full)
    return sums


def _is_weights(name: str) -> bool:
    return name == ONE or re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name) is not None


def _files(tensors: dict[str, Tensor], most: int) -> list[list[str]]:
    """Divide names into files of at most so many bytes."""
    files: list[list[str]] = []
    room = 0
    for name, tensor in tensors.items():
        if not files or tensor.nbytes > room:
            files.append([])
            room = most
        files[-1].append(name)
        room -= tensor.nbytes
    return files


def _titled(files: Sequence[tuple[int, list[str]]], root: Path, nonce: str) -> list[ModelFile]:
    """Number the files of all ranks."""
    titles = [ONE] if len(files) == 1 else [f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))]
    return [ModelFile(*file, root / f".{title}.{nonce}", root / title) for file, title in zip(files, titles, strict=True)]


def _write(files: Sequence[ModelFile], tensors: Mapping[str, Tensor]) -> None:
    for file in files:
        write_tensors(file.draft, {name: tensors[name] for name in file.tensors}, {"format": "pt"})


def _publish(root: Path, files: Sequence[ModelFile], size: int) -> None:
    """Give the files their names, and write the index in the end; where that fails, take all of them away again."""
    with ExitStack() as made:
        for file in files:
            os.rename(file.draft, file.target)
            made.callback(file.target.unlink, missing_ok=True)
        flush_folder(root)
        if len(files) > 1:
            draft = root / f".{INDEX}.{secrets.token_hex(8)}"
            made.callback(draft.unlink, missing_ok=True)
            _write_index(draft, files, size)
            os.rename(draft, root / INDEX)
            made.callback((root / INDEX).unlink, missing_ok=True)
            flush_folder(root)
        made.pop_all()


def _write_index(path: Path, files: Sequence[ModelFile], size: int) -> None:
    weight_map = {name: file.target.name for file in files for name in file.tensors}
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}, indent=2) + "\n"
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def holds_model_files(folder: Path) -> bool:
    """Tell whether a folder has a model's weights as Hugging Face lays them out."""
    return any((folder / name).exists() for name in (INDEX, ONE))


def open_model_files(folder: Path) -> Contents:
    """Find the tensors of such a folder; nobody has noted digests.

    Raises:
        CheckpointError: the index and the files do not have the same tensors, or a name leaves the folder.
    """
    weight_map = None
    if (folder / INDEX).exists():
        weight_map = read_json(read_plain(folder, INDEX, _MOST_INDEX), f"{folder.name}/{INDEX}").get("weight_map")
        if type(weight_map) is not dict or not all(type(file) is str and _FILE.fullmatch(file) for file in weight_map.values()):
            raise CheckpointError(f"{escaped(f'{folder.name}/{INDEX}')} has no weight_map from names to files beside it")
    tensors: dict[str, Stored] = {}
    files: dict[str, tuple[int, str | None]] = {}
    for file_name in sorted(set(weight_map.values())) if weight_map is not None else [ONE]:
        with TensorFile(folder, file_name) as file:
            files[file_name] = file.size, file.header
            expected = file.spans.keys() if weight_map is None else {name for name, home in weight_map.items() if home == file_name}
            if odd := file.spans.keys() ^ expected:
                raise CheckpointError(f"{escaped(file.name)} and the index do not have the same tensors: {listed(odd)}")
            for name, span in file.spans.items():
                tensors[name] = Stored(span.dtype, span.shape, (StoredPart(Box.of_whole(span.shape), file_name, None),))
    return Contents(folder, tensors, {}, files, None)
