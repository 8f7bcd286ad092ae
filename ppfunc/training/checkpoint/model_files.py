"""Write and find safetensors files under a model's own names, with an index, as Hugging Face has them."""

import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ppfunc.stage.layout import whole

from .errors import CheckpointError, escaped, listed
from .folders import flush_folder, make_folder
from .manifest import Box, Contents, Stored, StoredPart
from .naming import Names, named_leaves
from .peers import Group, Peers
from .saving import forms_of, plan_of, require_same, take_parts
from .tensor_file import new_file, on_host, open_tensors, read_json, read_plain, write_at, write_tensors

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors", re.ASCII)
_MOST_INDEX = 2**28  # bytes


def export(
    folder: str | Path, params: Any, names: Names = None, *, most: int = 5 * 10**9, group: Group = None
) -> Path:
    """Write parameters as safetensors files under the model's own names, as Hugging Face does: transformers
    and others read them.

    All ranks call it; tensors that lie over a mesh are gathered one after the other, and each rank writes
    files of its own.

    Args:
        folder: may have other files, such as ``config.json``.
        params: ``{stage: tree}`` of this process, or any other tree of tensors, taken as they are: take those
            of the state that the last step returned, since a step with ``donate=True`` writes into the
            tensors of the state before, and where it fails leaves them half updated.
        names: see :func:`ppfunc.checkpoint.save`; a name without them has the number of its stage.
        most: bytes of a file; a larger tensor has one of its own.
        group: see :func:`ppfunc.checkpoint.save`.

    Returns:
        The folder, with ``model.safetensors``, or with ``model-00001-of-00002.safetensors`` and so on and the
        index, which is written last.

    Raises:
        FileExistsError: the folder has weights.
        OSError: the disk is full, or does not work. What is left of the export cannot be read.
        TypeError, ValueError: a leaf that is no tensor, no tensor at all, or tensors that do not fit
            together; names them.

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
        leaves: list[tuple[str, torch.Tensor]] = []

        def look() -> dict[str, Any]:
            for name, leaf in named_leaves(params, names, "params")[0]:
                if not isinstance(leaf, torch.Tensor):
                    raise TypeError(f"params: {escaped(name)} is no tensor; leave it out")
                leaves.append((name, leaf))
            return {"forms": forms_of(leaves, whole=True), "nonce": secrets.token_hex(8)}

        answers = peers.together(look)
        plan, shared = plan_of(root, None, [answer["forms"] for answer in answers])
        if not plan.tensors:
            raise ValueError(
                "params: got no tensor, on any rank; expected {stage: tree}, such as split.params"
            )
        peers.together(lambda: _require_no_weights(root))
        mine: dict[str, torch.Tensor] = {}

        @torch.no_grad()
        def gather() -> dict[str, Any]:
            # Whole ones, which all ranks gather together, one after the other.
            parts = ((name, Box.of_whole(leaf.shape), whole(leaf.detach())) for name, leaf in leaves)
            taken, sums = take_parts(peers, parts, plan, shared, lambda name, part: on_host(part))
            mine.update(taken)
            return {
                "files": _divided(mine, most),
                "bytes": sum(t.nbytes for t in mine.values()),
                "sums": sums,
            }

        gathered = peers.together(gather)
        require_same([answer["sums"] for answer in gathered])
        files = _titled([files for answer in gathered for files in answer["files"]])
        size = sum(answer["bytes"] for answer in gathered)
        _publish(peers, root, root / f".export-{answers[0]['nonce']}", files, mine, size)
    return root


def _publish(
    peers: Peers,
    root: Path,
    draft: Path,
    files: Mapping[str, Sequence[str]],
    mine: Mapping[str, torch.Tensor],
    size: int,
) -> None:
    """Write the files in a draft, then move them into the folder: all appear, or none that is read.

    Args:
        files: names of tensors, by file.
        mine: the tensors that this rank writes.
        size: bytes of all tensors, for the index.
    """
    titles = [*files, INDEX] if len(files) > 1 else [*files]  # the index comes last

    def write() -> None:
        make_folder(draft)
        for title, names in files.items():
            if names[0] in mine:
                write_tensors(draft / title, {name: mine[name] for name in names}, {"format": "pt"})

    def publish() -> None:
        if peers.rank == 0:
            if len(files) > 1:
                homes = {name: title for title, names in files.items() for name in names}
                index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(homes.items()))}
                with new_file(draft / INDEX) as file:
                    write_at(file, (json.dumps(index, indent=2) + "\n").encode(), 0)
            # One after the other: without the last nobody reads them.
            for title in titles:
                os.rename(draft / title, root / title)
                flush_folder(root)

    try:
        peers.together(write)
        peers.together(publish)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _require_no_weights(root: Path) -> None:
    """Make the folder, and raise FileExistsError if it has weights."""
    make_folder(root)
    titles = re.compile(rf"{INDEX}|{ONE}|model-\d{{5}}-of-\d{{5}}\.safetensors")
    if weights := [entry.name for entry in os.scandir(root) if titles.fullmatch(entry.name)]:
        raise FileExistsError(f"{root} has weights: {listed(weights)}; give another folder, or delete them")


def _divided(tensors: Mapping[str, torch.Tensor], most: int) -> list[list[str]]:
    files: list[list[str]] = []
    room = 0
    for name, tensor in tensors.items():
        if not files or tensor.nbytes > room:
            files.append([])
            room = most
        files[-1].append(name)
        room -= tensor.nbytes
    return files


def _titled(files: Sequence[list[str]]) -> dict[str, list[str]]:
    if len(files) == 1:
        return {ONE: files[0]}
    return {
        f"model-{n:05}-of-{len(files):05}.safetensors": tensors for n, tensors in enumerate(files, start=1)
    }


def holds_model_files(folder: Path) -> bool:
    """Tell whether a folder has a model's weights as Hugging Face lays them out."""
    return any((folder / name).exists() for name in (INDEX, ONE))


def open_model_files(folder: Path) -> Contents:
    """Find the tensors of such a folder, which has no digests.

    Raises:
        CheckpointError: the index and the files do not have the same tensors, or a name leaves the folder.
    """
    homes = None
    if (folder / INDEX).exists():
        index = read_json(read_plain(folder, INDEX, _MOST_INDEX), f"{folder.name}/{INDEX}")
        homes = index.get("weight_map")
        if type(homes) is not dict or not all(
            type(file) is str and _FILE.fullmatch(file) for file in homes.values()
        ):
            raise CheckpointError(
                f"{escaped(f'{folder.name}/{INDEX}')} has no weight_map from names to files beside it"
            )
    tensors: dict[str, Stored] = {}
    files: dict[str, tuple[int, str]] = {}
    for title in [ONE] if homes is None else sorted(set(homes.values())):
        with open_tensors(folder, title) as file:
            files[title] = file.size, file.header
            expected = file.spans if homes is None else [n for n, home in homes.items() if home == title]
            if odd := file.spans.keys() ^ set(expected):
                raise CheckpointError(
                    f"{escaped(file.name)} and the index do not have the same tensors: {listed(odd)}"
                )
            for name, span in file.spans.items():
                part = StoredPart(Box.of_whole(span.shape), title, None)
                tensors[name] = Stored(span.dtype, span.shape, (part,))
    return Contents(folder, tensors, {}, files, None)
