"""Load a tree of tensors: from the boxes that files have into those that this rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppfunc.stage.layout import distributed, layout_of, local

from .boxes import Box, box_of
from .errors import CheckpointError, RankError, escaped, listed, reading
from .folders import checkpoints, is_stray, on_the_way
from .manifest import MANIFEST, Contents, NamedPart
from .model_files import holds_model_files, open_model_files
from .naming import Leaf, Names, named_leaves
from .peers import Peers
from .tensor_file import TensorFile, dtype_name
from .threads import in_threads
from .verify import open_checkpoint, open_part, require_digest, require_some, tell_refused


def load_tree(peers: Peers, folder: Path, like: Any, names: Names) -> Any:
    """See :func:`ppfunc.load`."""
    leaves: list[tuple[str, Leaf]] = []

    def look() -> dict[str, Any]:
        found, structure = named_leaves(like, names, "like")
        leaves.extend(found)
        treedef.append(structure)
        return {"forms": dict(map(_form, leaves)), "folders": [str(path) for path in _candidates(folder)] if peers.rank == 0 else []}

    treedef: list[Any] = []
    told = peers.together(look)
    wanted = _wanted([found["forms"] for found in told])
    candidates, refused = list(map(Path, told[0]["folders"])), []
    for path in candidates:
        try:
            loaded = _read_together(peers, path, leaves, wanted)
        except CheckpointError as error:
            if candidates == [folder] or isinstance(error, RankError):
                raise
            refused.append(error)
            continue
        tell_refused(refused, path)
        return treedef[0].unflatten(loaded)
    require_some(refused, folder)
    raise FileNotFoundError(f"{folder} has no checkpoint")


def _read_together(peers: Peers, path: Path, leaves: Sequence[tuple[str, Leaf]], wanted: Mapping[str, list[Any]]) -> list[Leaf]:
    """Read the leaves of this rank, once all ranks have theirs.

    Raises:
        CheckpointError: a rank cannot read its part, or finds another checkpoint there than the first rank.
    """
    loaded: list[Leaf] = []

    def read() -> str:
        contents = _open(path)
        loaded.extend(_read(contents, leaves, wanted))
        return contents.digest

    digests = peers.together(read)
    if other := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise CheckpointError(f"{path} is another checkpoint on rank {other[0]} than on rank 0; give a folder that all ranks share")
    return loaded


def _candidates(folder: Path) -> list[Path]:
    """Find the folders to try: this one, or the checkpoints in it, the latest first; none where the first is still being written."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder")
    with reading(folder):
        if (folder / MANIFEST).exists() or holds_model_files(folder):
            return [folder]
        found = checkpoints(folder)
        others = [path for path in folder.iterdir() if on_the_way(path) != "writing" and not is_stray(path.name)]
    if others and not found:
        raise CheckpointError(f"{folder} has neither {MANIFEST}, the sign of a checkpoint that is whole, nor checkpoints in it")
    return found


def _open(path: Path) -> Contents:
    with reading(path):
        if not path.exists() and not path.is_symlink():
            raise CheckpointError(f"{escaped(path)}, which the first rank has found, is not there; give a folder that all ranks share")
        return open_model_files(path) if holds_model_files(path) and not (path / MANIFEST).exists() else open_checkpoint(path)


def _form(named: tuple[str, Leaf]) -> tuple[str, list[Any]]:
    """Describe the form of a leaf, as JSON."""
    name, leaf = named
    return name, [dtype_name(leaf.dtype), list(leaf.shape)] if isinstance(leaf, Tensor) else [type(leaf).__name__, None]


def _wanted(told: Sequence[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    """Unite the forms of the leaves of all ranks."""
    wanted: dict[str, list[Any]] = {}
    for rank, forms in enumerate(told):
        for name, form in forms.items():
            if wanted.setdefault(name, form) != form:
                raise ValueError(f"like: {escaped(name)} is {_told(form)} on rank {rank}, and {_told(wanted[name])} on another")
    return wanted


def _told(form: Sequence[Any]) -> str:
    return f"a number or text, {form[0]}" if form[1] is None else f"{form[0]}{form[1]}"


def _require_fit(contents: Contents, wanted: Mapping[str, list[Any]]) -> None:
    """Raise ValueError unless names, shapes and dtypes are the same on both sides."""
    held: dict[str, list[Any]] = {name: [dtype_name(t.dtype), list(t.shape)] for name, t in contents.tensors.items()}
    held |= {name: [type(value).__name__, None] for name, value in contents.values.items()}
    where = contents.folder.name
    mend = "load what was saved: of the same optimizer, scale and stages, with the same names=; pp.export writes parameters alone"
    if lost := wanted.keys() - held.keys():
        raise ValueError(f"{where} lacks {listed(lost)}, which like has; {mend}")
    if more := held.keys() - wanted.keys():
        raise ValueError(f"like lacks {listed(more)}, which {where} has; {mend}")
    for name, form in wanted.items():
        if held[name] != form:
            raise ValueError(f"{where}: {escaped(name)} is {_told(held[name])}, like has {_told(form)}")


def _read(contents: Contents, leaves: Sequence[tuple[str, Leaf]], wanted: Mapping[str, list[Any]]) -> list[Leaf]:
    """Read the leaves of this rank."""
    _require_fit(contents, wanted)
    loaded: list[Leaf] = [contents.values[name] if name in contents.values else _fresh(leaf) for name, leaf in leaves]  # type: ignore[arg-type]
    tasks: dict[str, list[ReadTask]] = {}
    for (name, leaf), new in zip(leaves, loaded, strict=True):
        if isinstance(leaf, Tensor) and isinstance(new, Tensor):
            stored, box = contents.tensors[name], box_of(leaf, escaped(name))
            for part in stored.parts:
                if part.box & box:
                    tasks.setdefault(part.file, []).append(ReadTask(NamedPart(name, stored.dtype, part), new, box))

    def read(file_name: str) -> None:
        with open_part(contents, file_name, [task.source for task in tasks[file_name]]) as file:
            in_threads(partial(_copy, file), tasks[file_name])

    in_threads(read, list(tasks))
    return [distributed(new, layout_of(leaf)) if isinstance(new, Tensor) else new for new, (_, leaf) in zip(loaded, leaves, strict=True)]  # type: ignore[arg-type]


class ReadTask(NamedTuple):
    """A part of a tensor to read.

    Args:
        source: where it is.
        into: what this rank holds of the tensor, the box ``box``.
    """

    source: NamedPart
    into: Tensor
    box: Box


def _fresh(leaf: Tensor) -> Tensor:
    """Allocate memory for the part of a tensor that this rank holds, laid out as that is."""
    own = local(leaf).detach()
    return torch.empty_like(own, device="cpu" if own.is_meta else own.device)


def _copy(file: TensorFile, task: ReadTask) -> None:
    """Read a part of a tensor, verify it, and copy what this rank holds of it."""
    (name, dtype, (part, _, _)), into, box = task
    direct = part == box and into.device.type == "cpu" and into.is_contiguous()
    read = into if direct else torch.empty(part.shape, dtype=dtype, device="cpu")
    require_digest(file, task.source, file.read(name, read))
    shared = part & box
    if shared is not None and not direct:
        into[shared.within(box)] = read[shared.within(part)].to(into.device)
