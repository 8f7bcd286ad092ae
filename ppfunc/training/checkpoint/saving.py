"""Save a tree of tensors, on one rank or many: all of it appears, or nothing.

Files are written here, not by ``torch.distributed.checkpoint``: its ranks talk in pickles, which run code, and neither of its storages has
digests, flushes, or checks that what it reads covers a tensor.

====================  =================================================================================
every rank            tells names, dtypes, shapes and the boxes that it holds; the same plan is made on all
every rank            writes the boxes that the plan gives it into one file, flushes it, tells the digests
the first rank        writes the manifest, flushes it, renames the folder, flushes the folder around it
====================  =================================================================================
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ppfunc.stage.layout import local

from ..checksums import checksum
from ..train_state import TrainState, require_not_given_up
from .boxes import Box, box_of, require_tiled
from .errors import CheckpointError, escaped
from .folders import Draft, clean, flush_folder, writing
from .manifest import Contents, Stored, StoredPart, Value, file_name, manifest_text
from .naming import Leaf, Names, named_leaves
from .peers import Group, Peers
from .tensor_file import DTYPES_BY_NAME, copied, dtype_name, require_storable, write_tensors
from .verify import clear_way

Key = tuple[str, Box]


class TensorForm(NamedTuple):
    """A tensor of a state, without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class WritePlan(NamedTuple):
    """Who writes what.

    Args:
        forms: of all tensors, by name.
        owners: the rank that writes a box.
        shared: the boxes that several leaves hold, whose values have to be the same.
        values: numbers and texts, by name.
    """

    forms: dict[str, TensorForm]
    owners: dict[Key, int]
    shared: set[Key]
    values: dict[str, Value]


def forms_of(leaves: Sequence[tuple[str, Leaf]], whole: bool = False) -> dict[str, Any]:
    """Describe the forms of a rank's leaves, as JSON; with ``whole``, of all tensors as if it held them whole."""
    tensors: list[list[Any]] = []
    values: dict[str, list[Any]] = {}
    for name, leaf in leaves:
        if isinstance(leaf, Tensor):
            require_storable(local(leaf), escaped(name))
            box = Box.of_whole(leaf.shape) if whole else box_of(leaf, escaped(name))
            tensors.append([name, dtype_name(leaf.dtype), list(leaf.shape), *map(list, box)])
        else:
            value = leaf.hex() if type(leaf) is float else leaf
            if values.setdefault(name, [type(leaf).__name__, value]) != [type(leaf).__name__, value]:
                raise ValueError(f"{escaped(name)} is {leaf!r} in one place, and {values[name][1]!r} in another")
    return {"tensors": tensors, "values": values}


def plan_of(told: Sequence[Mapping[str, Any]]) -> WritePlan:
    """Plan who writes what, from what all ranks have told; the same on every rank.

    Raises:
        ValueError: ranks hold one name with other shapes, dtypes or values, or their parts leave a gap or overlap.
    """
    forms: dict[str, tuple[TensorForm, int]] = {}
    holders: dict[Key, list[int]] = {}
    values: dict[str, tuple[Any, int]] = {}
    for rank, found in enumerate(told):
        for name, dtype, shape, offset, part in found["tensors"]:
            form = TensorForm(DTYPES_BY_NAME[dtype], tuple(shape))
            known, other = forms.setdefault(name, (form, rank))
            if form != known:
                raise ValueError(f"{escaped(name)} is {_told(known)} on rank {other}, and {_told(form)} on rank {rank}")
            holders.setdefault((name, Box(tuple(offset), tuple(part))), []).append(rank)
        for name, value in found["values"].items():
            known_value, other = values.setdefault(name, (value, rank))
            if value != known_value:
                raise ValueError(f"{escaped(name)} is {known_value[1]} on rank {other}, and {value[1]} on rank {rank}; expected the same")
    if both := sorted(values.keys() & forms.keys()):
        raise ValueError(f"{escaped(both[0])} is a tensor in one place, and a number or a text in another")
    boxes: dict[str, list[Box]] = {}
    for name, box in holders:
        boxes.setdefault(name, []).append(box)
    for name, (form, _) in forms.items():
        require_tiled(boxes[name], form.shape, escaped(name))
    owners, load = {}, [0] * len(told)
    for key in sorted((key for key in holders if key[1].numel), key=lambda key: (-key[1].numel * forms[key[0]][0].dtype.itemsize, key)):
        owners[key] = min(holders[key], key=lambda rank: (load[rank], rank))
        load[owners[key]] += key[1].numel * forms[key[0]][0].dtype.itemsize
    shared = {key for key, ranks in holders.items() if len(ranks) > 1}
    plain = {name: float.fromhex(value) if kind == "float" else value for name, ((kind, value), _) in values.items()}
    return WritePlan({name: form for name, (form, _) in forms.items()}, owners, shared, plain)


def _told(form: TensorForm) -> str:
    return f"{dtype_name(form.dtype)}{list(form.shape)}"


def sums_of(leaves: Sequence[tuple[str, Leaf]], plan: WritePlan) -> list[list[Any]]:
    """Compute the checksums of the boxes of this rank that others hold, too."""
    found = []
    for name, leaf in leaves:
        if isinstance(leaf, Tensor):
            key = name, box_of(leaf, name)
            if key in plan.shared:
                found.append([name, list(key[1].offset), int(checksum(local(leaf)))])
    return found


def require_same(told: Sequence[Sequence[Sequence[Any]]]) -> None:
    """Raise ValueError where copies of one tensor differ."""
    first: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}
    for rank, sums in enumerate(told):
        for name, offset, bits in sums:
            known, other = first.setdefault((name, tuple(offset)), (bits, rank))
            if bits != known:
                where = f"on rank {other} and on rank {rank}" if rank != other else f"in two places of rank {rank}"
                mend = "parts of one tensor have to be DTensors, and different tensors need different names"
                raise ValueError(f"{escaped(name)} has other values {where}; {mend}")


class SaveWork(NamedTuple):
    """The rest of a save, for which the state is not needed any more.

    Args:
        target: the folder of the checkpoint.
        nonce: of the save.
        mine: the boxes that this rank writes, by name.
        sums: see :func:`sums_of`.
        plan: of all ranks.
        grid: sizes of the axes, for people.
        keep: checkpoints.
        draft: of the first rank.
    """

    target: Path
    nonce: str
    mine: dict[str, Tensor]
    sums: list[list[Any]]
    plan: WritePlan
    grid: dict[str, int]
    keep: int | None
    draft: Draft | None


def prepare(
    peers: Peers, folder: str | Path, state: Any, step: int | None, keep: int | None, names: Names, group: Group,
    spare: Mapping[str, Tensor] | None, held: ExitStack,
) -> SaveWork:  # fmt: skip
    """Agree on a plan: the first part of a save.

    Args:
        spare: memory for copies, which the work is to have of its tensors; None where it needs none.
        held: of the draft.
    """
    root = Path(folder).absolute()
    leaves: list[tuple[str, Leaf]] = []

    def look() -> dict[str, Any]:
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ValueError(f"keep: got {keep!r}, expected a number of checkpoints, at least 1, or None for all")
        states = _train_states(state)
        for one in states:
            require_not_given_up(one)
        leaves.extend(named_leaves(state, names, "state")[0])
        found: dict[str, Any] = {"step": _step(leaves, states, step), **forms_of(leaves)}
        if peers.rank == 0:
            draft.append(held.enter_context(Draft(root, found["step"])))
            clear_way(draft[0].target, draft[0].nonce)
            found["nonce"] = draft[0].nonce
        return found

    draft: list[Draft] = []
    told = peers.together(look)
    if other := [rank for rank, found in enumerate(told) if found["step"] != told[0]["step"]]:
        raise ValueError(f"step: rank 0 saves step {told[0]['step']}, rank {other[0]} saves step {told[other[0]]['step']}")
    plan = plan_of(told)
    mine: dict[str, Tensor] = {}
    for name, leaf in leaves:
        if isinstance(leaf, Tensor) and name not in mine and plan.owners.get((name, box_of(leaf, name))) == peers.rank:
            mine[name] = local(leaf) if spare is None else copied(local(leaf), spare.get(name))
    return SaveWork(
        root / f"step-{told[0]['step']}", told[0]["nonce"], mine, sums_of(leaves, plan), plan, _grid(leaves, group, peers), keep,
        draft[0] if draft else None,
    )  # fmt: skip


def _train_states(tree: Any) -> list[TrainState]:
    """Find the training states in a tree."""
    parts = optree.tree_leaves(tree, is_leaf=lambda part: isinstance(part, TrainState))
    return [part for part in parts if isinstance(part, TrainState)]


def _step(leaves: Sequence[tuple[str, Leaf]], states: Sequence[TrainState], step: int | None) -> int:
    """Take the step that is given, or the leaf called ``step``, or that of the one training state."""
    if step is None:
        found = dict(leaves).get("step", states[0].step if len(states) == 1 else None)
        step = int(found) if isinstance(found, Tensor) and found.numel() == 1 and not found.dtype.is_floating_point else found  # type: ignore[assignment]
    if type(step) is not int or step < 0:
        raise ValueError(f"step: got {step!r}, expected a number; give step=, or a state with a leaf called step, or with one TrainState")
    return step


def _grid(leaves: Sequence[tuple[str, Leaf]], group: Group, peers: Peers) -> dict[str, int]:
    mesh = group if isinstance(group, DeviceMesh) else next((t.device_mesh for _, t in leaves if isinstance(t, DTensor)), None)
    axes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)) if mesh is not None and mesh.mesh_dim_names else {}
    return {"ranks": peers.size, **axes}


def write(peers: Peers, work: SaveWork) -> Path:
    """Write, commit, delete old checkpoints: the second part of a save."""
    file, temporary = file_name(peers.rank, peers.size), writing(work.target, work.nonce)

    def put() -> dict[str, Any]:
        record = None
        if work.mine:
            if not temporary.is_dir():
                raise CheckpointError(f"{temporary}, which the first rank has made, is not there; give a folder that all ranks share")
            record = write_tensors(temporary / file, work.mine, {"save": work.nonce, "format": "pt"})
            flush_folder(temporary)
        return {"file": record, "sums": work.sums}

    told = peers.together(put)

    def commit() -> None:
        if work.draft is not None:
            require_same([found["sums"] for found in told])
            contents = _contents(work, [found["file"] for found in told])
            work.draft.seal(contents, manifest_text(contents, work.nonce, work.grid))
            clear_way(work.target, work.nonce)
            work.draft.commit()
            try:
                clean(work.target, work.keep)
            except (OSError, CheckpointError) as error:  # the checkpoint is there
                warnings.warn(f"{work.target} is saved, but old checkpoints could not be deleted: {error}", stacklevel=2)

    peers.together(commit)
    return work.target


def _contents(work: SaveWork, records: Sequence[Any]) -> Contents:
    """Describe the files that the ranks have written."""
    parts: dict[str, list[StoredPart]] = {name: [] for name in work.plan.forms}
    for (name, box), rank in work.plan.owners.items():
        parts[name].append(StoredPart(box, file_name(rank, len(records)), records[rank][2][name]))
    files = {file_name(rank, len(records)): (record[0], record[1]) for rank, record in enumerate(records) if record}
    tensors = {name: Stored(form.dtype, form.shape, tuple(sorted(parts[name]))) for name, form in work.plan.forms.items()}
    return Contents(work.target, tensors, work.plan.values, files, int(work.target.name.removeprefix("step-")))
