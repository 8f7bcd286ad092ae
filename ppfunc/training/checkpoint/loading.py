"""Load a tree of tensors: from the boxes that files have into those that this rank holds."""

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from ppfunc.runtime.agreement.comparison import differences
from ppfunc.stage.layout import distributed, layout_of, local
from ppfunc.stage.patterns import first_match

from .errors import CheckpointError, escaped, listed, reading
from .folders import PartToRead, checkpoints, first_good, open_checkpoint, read_parts, step_of
from .manifest import MANIFEST, Contents, box_of
from .model_files import holds_model_files, open_model_files
from .naming import Leaf, Names, named_leaves
from .peers import Peers
from .tensor_file import dtype_name

Leaves = Sequence[tuple[str, Leaf]]

Wanted = Mapping[str, tuple[str, str]]
"""The form of every leaf by its name, and of several ranks the first that has it, for errors."""

Reader = Callable[[Sequence[PartToRead]], object]
"""Read parts of tensors into those of this rank."""

_COUNT = r"optimizer\.(.*\.)?updates"

Opener = Callable[[Path], tuple[Contents, Reader]]
"""Find what a folder holds, and how its tensors are read."""


def load_tree(
    peers: Peers,
    folder: Path,
    like: Any,
    names: Names,
    run: str | None,
    partial: str | None,
    opener: Opener | None = None,
) -> Any:
    """Load a state; see :func:`load`.

    Args:
        opener: opens a folder of another form; by default checkpoints and model files are opened.
    """
    leaves: list[tuple[str, Leaf]] = []

    def look() -> dict[str, Any]:
        named, structure = named_leaves(like, names, "like")
        leaves.extend(named)
        treedef.append(structure)
        candidates = [folder]
        if not (opener or peers.rank):
            if not folder.is_dir():
                raise FileNotFoundError(
                    f"folder: {folder} is no folder; give one that save or export has written"
                )
            alone = step_of(folder) is not None or (folder / MANIFEST).exists() or holds_model_files(folder)
            # Else the checkpoints in it, the latest first.
            candidates = [folder] if alone else checkpoints(folder)
        return {
            "forms": {name: _form(leaf) for name, leaf in named},
            "folders": list(map(str, candidates)),
        }

    treedef: list[Any] = []
    answers = peers.together(look)
    wanted = _wanted([answer["forms"] for answer in answers])

    def read(path: Path) -> list[Leaf]:
        return _read_together(peers, path, leaves, wanted, run, partial, opener or _open)

    paths = list(map(Path, answers[0]["folders"]))
    loaded = read(folder) if paths == [folder] else first_good(paths, read, folder)
    if loaded is None:
        raise FileNotFoundError(f"{folder} has no checkpoint; give a folder that save or export has written")
    return treedef[0].unflatten(loaded)


def _read_together(
    peers: Peers,
    path: Path,
    leaves: Leaves,
    wanted: Wanted,
    run: str | None,
    partial: str | None,
    opener: Opener,
) -> list[Leaf]:
    """Read the leaves of this rank, once all ranks have theirs.

    Raises:
        CheckpointError: a rank cannot read its part, or finds another checkpoint there than the first rank.
    """
    loaded: list[Leaf] = []
    messages: list[str] = []

    def read() -> str:
        contents, reader = opener(path)
        if run is not None and contents.run != run:
            raise ValueError(
                f"run: got {run!r}, and {path} is a checkpoint of the run {contents.run!r}; give that run, or"
                " none"
            )
        messages.append(_require_fit(contents, wanted, partial))
        loaded.extend(_read(contents, leaves, reader))
        return contents.digest

    digests = peers.together(read)
    if other := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise CheckpointError(
            f"{path} is another checkpoint on rank {other[0]} than on rank 0; give a folder that all ranks"
            " share"
        )
    if messages[0]:
        warnings.warn(messages[0], stacklevel=5)
    return loaded


def _open(path: Path) -> tuple[Contents, Reader]:
    with reading(path):
        if not path.exists() and not path.is_symlink():
            raise CheckpointError(
                f"{escaped(path)}, which the first rank has found, is not there; give a folder that all ranks"
                " share"
            )
        ours = (path / MANIFEST).exists() or not holds_model_files(path)
        contents = open_checkpoint(path) if ours else open_model_files(path)
    return contents, lambda parts: read_parts(contents, parts)


def _form(leaf: Leaf) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{dtype_name(leaf.dtype)}{list(leaf.shape)}"
    return f"a number or text, {type(leaf).__name__}"


def _wanted(answers: Sequence[Mapping[str, str]]) -> Wanted:
    places = [f" on rank {rank}" if len(answers) > 1 else "" for rank in range(len(answers))]
    by_place = list(zip(places, answers, strict=True))
    for name, (one, known), (other, form) in differences(by_place):
        raise ValueError(
            f"like: {escaped(name)} is {form}{other}, and {known}{one}; give all ranks the state of one"
            " trainer"
        )
    return {name: (form, place) for place, forms in reversed(by_place) for name, form in forms.items()}


def _require_fit(contents: Contents, wanted: Wanted, partial: str | None) -> str:
    """Raise ValueError unless names, shapes and dtypes are the same on both sides.

    Returns:
        What only one side has, which these patterns allow; "" for nothing.
    """
    stored = {name: f"{dtype_name(t.dtype)}{list(t.shape)}" for name, t in contents.tensors.items()}
    stored |= {name: _form(value) for name, value in contents.values.items()}
    stored |= dict.fromkeys(contents.objects, "a pickled object, which is never read")
    where = contents.folder.name
    mend = (
        "load what was saved: of the same optimizer and version of ppfunc, scale and stages, with the same"
        " names=; names=split, of each split, in save and load is for other stages; pp.checkpoint.export"
        " writes parameters alone; partial= takes a part"
    )
    missing, more = wanted.keys() - stored.keys(), stored.keys() - wanted.keys()
    patterns = [] if partial is None else partial.split("|")
    matched = {name: first_match(name, patterns) for name in missing | more}
    if refused := [name for name in missing if matched[name] is None]:
        refused.sort()
        tails = tuple(f".{name}" for name in refused[:3])
        near = [name for name in more if name.endswith(tails)] or get_close_matches(refused[0], sorted(more))
        has = f", and has {listed(near)}" if near else ""
        raise ValueError(
            f"{where} lacks {listed(refused)}, which like has{wanted[refused[0]][1]}{has}; {mend}"
        )
    if refused := [name for name in more if matched[name] is None]:
        raise ValueError(f"like lacks {listed(refused)}, which {where} has; {mend}")
    for pattern in patterns:
        if pattern not in matched.values():
            raise ValueError(f"partial: {pattern!r} names nothing that {where} or like lacks; leave it out")
    if not wanted.keys() & stored.keys():
        raise ValueError(f"partial: nothing of like is in {where}: {listed(missing)}; {mend}")
    for name in wanted.keys() & stored.keys():
        if stored[name] != wanted[name][0]:
            raise ValueError(
                f"{where}: {escaped(name)} is {stored[name]}, like has {wanted[name][0]}; give like= a leaf"
                " of that form, or none"
            )
    _require_whole(where, wanted, missing)
    left, unchanged = (f"{listed(names)}" if names else "nothing" for names in (more, missing))
    return f"{where} was loaded in part: left out {left}; as in like stays {unchanged}" if matched else ""


def _require_whole(where: str, wanted: Iterable[str], missing: Collection[str]) -> None:
    """Raise ValueError for an optimizer of which only a part is loaded: its count belongs to its moments.

    A state of a rate (``rate``) may begin anew beside them.
    """
    counts = [name.removesuffix("updates") for name in wanted if re.fullmatch(_COUNT, name)]
    lacking, taken = dict[str, list[str]](), dict[str, str]()
    for name in wanted if missing and counts else ():
        state = max((count for count in counts if name.startswith(count)), key=len, default="")
        if name in missing and state and not name.startswith(f"{state}rate."):
            lacking.setdefault(state, []).append(name)
        elif name not in missing:
            taken.setdefault(state, name)
    for state in sorted(lacking.keys() & taken.keys()):
        raise ValueError(
            f"partial: {where} lacks {listed(lacking[state])}, and has {escaped(taken[state])} of the same"
            ' optimizer, which is loaded whole or not at all; load {"params": params} with'
            ' partial="optimizer.*|step", and begin with trainer.init'
        )


def _read(contents: Contents, leaves: Leaves, reader: Reader) -> list[Leaf]:
    loaded: list[Leaf] = []
    parts: list[PartToRead] = []
    for name, leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            loaded.append(contents.values.get(name, leaf))
            continue
        local_part = local(leaf).detach()
        if name not in contents.tensors:
            if local_part.is_meta:
                where = contents.folder.name
                raise ValueError(
                    f"like: {escaped(name)}, which {where} lacks, has no values on meta; give a tensor with"
                    " values, such as of trainer.init(params)"
                )
            loaded.append(local_part.clone())
            continue
        new = torch.empty_like(local_part, device="cpu" if local_part.is_meta else local_part.device)
        box = box_of(leaf, escaped(name))
        parts += [PartToRead(name, part, new, box) for part in contents.tensors[name].parts if part.box & box]
        loaded.append(new)
    reader(parts)
    return [
        distributed(new, layout_of(leaf))
        if isinstance(new, torch.Tensor) and isinstance(leaf, torch.Tensor)
        else new
        for new, (_, leaf) in zip(loaded, leaves, strict=True)
    ]
