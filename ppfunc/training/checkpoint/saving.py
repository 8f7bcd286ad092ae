"""Save a tree of tensors, on one rank or many: all of it appears, or nothing.

Files are written here, not by ``torch.distributed.checkpoint``: its ranks talk in pickles, which run code,
and neither of its storages has digests, flushes, or checks that what it reads covers a tensor.

====================  =================================================================================
every rank            sends names, dtypes, shapes and the boxes that it holds; the same plan is made on all
every rank            writes the boxes that the plan gives it into one file, flushes it, sends the digests
the first rank        writes the manifest, flushes it, renames the folder, flushes the folder around it
====================  =================================================================================
"""

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import optree
from torch import Tensor

from ppfunc._checks import require_type
from ppfunc.runtime.agreement.comparison import checksum, differences
from ppfunc.stage.layout import local
from ppfunc.stage.process import hold_interrupts

from ..update.train_state import TrainState, require_not_donated
from .errors import CheckpointError, escaped
from .folders import clean, clear_way, draft, flush_folder, require_run, writing
from .manifest import (
    MANIFEST,
    Box,
    Contents,
    Stored,
    StoredPart,
    Value,
    box_of,
    file_name,
    manifest_text,
    require_tiled,
)
from .naming import Leaf, Names, named_leaves
from .peers import Peers
from .tensor_file import (
    DTYPES_BY_NAME,
    copied,
    dtype_name,
    new_file,
    require_storable,
    write_at,
    write_tensors,
)

Key = tuple[str, Box]


def forms_of(leaves: Sequence[tuple[str, Leaf]], whole: bool = False) -> list[list[Any]]:
    """Describe a rank's leaves as JSON: name and value, or name, dtype, shape, and offset and shape of the
    part that it holds; with ``whole``, as if it held all tensors whole.
    """
    forms: list[list[Any]] = []
    for name, leaf in leaves:
        if isinstance(leaf, Tensor):
            require_storable(local(leaf), escaped(name))
            box = Box.of_whole(leaf.shape) if whole else box_of(leaf, escaped(name))
            forms.append([name, dtype_name(leaf.dtype), list(leaf.shape), *map(list, box)])
        else:
            forms.append([name, leaf])
    return forms


def plan_of(folder: Path, step: int | None, answers: Sequence[Sequence[Any]]) -> tuple[Contents, set[Key]]:
    """Assign every part to the rank that writes it, from the forms of all ranks; the same on every rank.

    Returns:
        The contents of the checkpoint, without files and digests, and the boxes that several leaves hold,
        whose values have to be the same.

    Raises:
        ValueError: ranks hold one name with other shapes, dtypes or values, or their parts leave a gap or
            overlap.
    """
    named = ((rank, name, form) for rank, forms in enumerate(answers) for name, *form in forms)
    # Of a tensor its dtype and shape, else the value.
    texts = (
        (rank, {name: f"{form[0]}{form[1]}" if form[1:] else repr(form[0])}) for rank, name, form in named
    )
    for name, (one, known), (other, text) in differences(texts):
        raise ValueError(
            f"{escaped(name)} is {known} on rank {one}, and {text} on rank {other}; expected the same"
        )
    holders: dict[Key, list[int]] = {}
    tensors: dict[str, Stored] = {}
    values: dict[str, Value] = {}
    for rank, leaves in enumerate(answers):
        for name, *form in leaves:
            if len(form) == 1:
                values[name] = form[0]
                continue
            dtype, shape, offset, part = form
            tensors[name] = Stored(DTYPES_BY_NAME[dtype], tuple(shape), ())
            holders.setdefault((name, Box(tuple(offset), tuple(part))), []).append(rank)
    sizes = {(name, box): box.numel * tensors[name].dtype.itemsize for name, box in holders}
    parts: dict[str, list[StoredPart]] = {name: [] for name in tensors}
    load = [0] * len(answers)
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):  # each to the rank that has least so far
        name, box = key
        if sizes[key] or box == Box.of_whole(tensors[name].shape):
            writer = min(holders[key], key=lambda rank: (load[rank], rank))
            load[writer] += sizes[key]
            parts[name].append(StoredPart(box, file_name(writer, len(answers)), None))
    for name, stored in tensors.items():
        require_tiled((part.box for part in parts[name]), stored.shape, escaped(name))
        tensors[name] = stored._replace(parts=tuple(sorted(parts[name])))
    shared = {key for key, ranks in holders.items() if len(ranks) > 1}
    return Contents(folder, tensors, values, {}, step), shared


def require_same(answers: Sequence[Sequence[Sequence[Any]]]) -> None:
    """Raise ValueError where copies of one tensor differ: name, offset and checksum of each, by rank."""
    sums = ((rank, {(name, *offset): bits}) for rank, s in enumerate(answers) for name, offset, bits in s)
    for (name, *_), (one, _), (other, _) in differences(sums):
        where = f"on rank {one} and on rank {other}" if one != other else f"in two places of rank {one}"
        mend = "parts of one tensor have to be DTensors, and different tensors need different names"
        raise ValueError(f"{escaped(name)} has other values {where}; {mend}")


class SaveWork(NamedTuple):
    """Describe the rest of a save, for which the state is not needed any more.

    Args:
        contents: the plan of all ranks.
        nonce: of the save.
        mine: the boxes that this rank writes, by name.
        sums: name, offset and checksum of the boxes of this rank that others hold as well.
        keep: checkpoints.
    """

    contents: Contents
    nonce: str
    mine: dict[str, Tensor]
    sums: list[list[Any]]
    keep: int | None


def prepare(
    peers: Peers,
    folder: str | Path,
    state: Any,
    step: int | None,
    keep: int | None,
    names: Names,
    run: str | None,
    spare: Mapping[str, Tensor] | None,
    stack: ExitStack,
) -> SaveWork:
    """Agree on a plan: the first part of a save.

    Args:
        spare: memory for copies of the tensors; None to take the tensors themselves.
        stack: deletes the draft in the end.
    """
    require_type("folder", folder, str | os.PathLike, "a path first, save(folder, state)")
    root = Path(folder).absolute()
    leaves: list[tuple[str, Leaf]] = []

    def describe() -> dict[str, Any]:
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ValueError(
                f"keep: got {keep!r}, expected a number of checkpoints, at least 1, or None for all"
            )
        if run is not None and (type(run) is not str or not run):
            raise TypeError(f"run: got {run!r}, expected a text that names the run, or None")
        leaves.extend(named_leaves(state, names, "state")[0])
        number = _step(leaves, _training_states(state), step)
        answer: dict[str, Any] = {"step": number, "forms": forms_of(leaves), "run": run}
        if peers.rank == 0:
            target = root / f"step-{number}"
            require_run(root, run)
            answer["nonce"] = stack.enter_context(draft(target))
            clear_way(target, answer["nonce"])
        return answer

    answers = peers.together(describe)
    first = answers[0]
    for key in "step", "run":
        if other := [rank for rank, answer in enumerate(answers) if answer[key] != first[key]]:
            ours, theirs = first[key], answers[other[0]][key]
            raise ValueError(
                f"{key}: rank 0 saves {key} {ours!r}, rank {other[0]} saves {key} {theirs!r}; give all ranks"
                " the same"
            )
    path = root / f"step-{first['step']}"
    plan, shared = plan_of(path, first["step"], [answer["forms"] for answer in answers])
    parts = ((name, box_of(leaf, name), local(leaf)) for name, leaf in leaves if isinstance(leaf, Tensor))

    def copy(name: str, part: Tensor) -> Tensor:
        return part if spare is None else copied(part, spare.get(name))

    mine, sums = take_parts(peers, parts, plan, shared, copy)
    return SaveWork(plan._replace(run=first["run"]), first["nonce"], mine, sums, keep)


def take_parts(
    peers: Peers,
    parts: Iterable[tuple[str, Box, Tensor]],
    plan: Contents,
    shared: Collection[Key],
    copy: Callable[[str, Tensor], Tensor],
) -> tuple[dict[str, Tensor], list[list[Any]]]:
    """Take the parts that the plan gives this rank to write.

    Args:
        parts: name, box and values of those that this rank holds.
        shared: the boxes that several leaves hold.
        copy: ``(name, values) -> values to write``, such as a copy on the host.

    Returns:
        The parts, by name; name, offset and checksum of the shared ones, for :func:`require_same`.
    """
    mine: dict[str, Tensor] = {}
    sums: list[list[Any]] = []
    for name, box, part in parts:
        if (name, box) in shared:
            sums.append([name, box.offset, int(checksum(part))])
        stored = StoredPart(box, file_name(peers.rank, peers.size), None)
        if name not in mine and stored in plan.tensors[name].parts:
            mine[name] = copy(name, part)
    return mine, sums


def _training_states(state: Any) -> list[TrainState]:
    """List the training states in a tree; raise ValueError for one that a step has written into."""
    leaves = optree.tree_leaves(state, is_leaf=lambda part: isinstance(part, TrainState))
    states = [leaf for leaf in leaves if isinstance(leaf, TrainState)]
    for training_state in states:
        require_not_donated(training_state)
    return states


def _step(leaves: Sequence[tuple[str, Leaf]], states: Sequence[TrainState], step: Any) -> int:
    """Take the step that is given, or the leaf called ``step``, or that of the one training state."""
    if step is None:
        step = dict(leaves).get("step", states[0].step if len(states) == 1 else None)
        if isinstance(step, Tensor) and step.numel() == 1 and not step.dtype.is_floating_point:
            step = int(step)
    if type(step) is not int or step < 0:
        raise ValueError(
            f"step: got {step!r}, expected a number; give step=, or a state with a leaf called step, or with"
            " one TrainState"
        )
    return step


def write(peers: Peers, work: SaveWork) -> Path:
    """Write, commit, delete old checkpoints: the second part of a save."""
    target, folder = work.contents.folder, writing(work.contents.folder, work.nonce)

    def write_own() -> dict[str, Any]:
        record = None
        if work.mine:
            if not folder.is_dir():
                raise CheckpointError(
                    f"{folder}, which the first rank has made, is not there; give a folder that all ranks"
                    " share"
                )
            path = folder / file_name(peers.rank, peers.size)
            record = write_tensors(path, work.mine, {"save": work.nonce, "format": "pt"})
            flush_folder(folder)
        return {"file": record, "sums": work.sums}

    answers = peers.together(write_own)

    def commit() -> None:
        if peers.rank == 0:
            require_same([answer["sums"] for answer in answers])
            # The contents again, with the files and digests that the ranks have written.
            records = [answer["file"] for answer in answers]
            written = {
                file_name(rank, len(records)): record
                for rank, record in enumerate(records)
                if record is not None
            }
            tensors = {
                name: stored._replace(
                    parts=tuple(part._replace(digest=written[part.file][2][name]) for part in stored.parts)
                )
                for name, stored in work.contents.tensors.items()
            }
            files = {name: (size, header) for name, (size, header, _) in written.items()}
            _commit(work.contents._replace(tensors=tensors, files=files), work.nonce)
            try:
                clean(target, work.keep)
            except (OSError, CheckpointError) as error:  # the checkpoint is there
                warnings.warn(
                    f"{target} is saved, but old checkpoints could not be deleted: {error}", stacklevel=2
                )

    with hold_interrupts():  # what one rank has committed is saved on all
        peers.together(commit)
    return target


def _commit(contents: Contents, nonce: str) -> None:
    """Write the manifest, and make the checkpoint appear in its folder.

    Args:
        contents: that the ranks have written into the draft of this nonce.

    Raises:
        CheckpointError: a file that another rank has written is not here.
        FileExistsError: a good checkpoint of this step, or of a later one, is there.
    """
    target, folder = contents.folder, writing(contents.folder, nonce)
    for name, (size, _) in contents.files.items():
        if not (folder / name).exists() or os.stat(folder / name).st_size != size:
            raise CheckpointError(
                f"{folder / name} is not as a rank has written it; give a folder that all ranks share"
            )
    with new_file(folder / MANIFEST) as file:
        write_at(file, manifest_text(contents, nonce), 0)
    flush_folder(folder)
    clear_way(target, nonce)
    try:
        os.rename(folder, target)
    except OSError as error:
        if target.exists():
            raise FileExistsError(
                f"{target} has been saved by another job at the same time; give each job a folder of its own"
            ) from error
        raise
    flush_folder(target.parent)
