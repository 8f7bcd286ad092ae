"""Save a tree of tensors, on any number of ranks: a folder appears whole, by a rename, or not at all.

====================  =================================================================================
every rank            sends names, dtypes, shapes and the boxes that it holds; the same plan is made on all
every rank            writes the boxes that the plan gives it into files of its own, flushes, sends digests
the first rank        writes the manifest, flushes it, renames the folder, flushes the folder around it
====================  =================================================================================

What travels between ranks is JSON, over the links of :class:`Peers`: no pickles, which run code.

========================  ====================================================================================
``step-12``               a checkpoint
``step-12.writing-...``   one that is being written, or that a dead writer has left
``step-12.damaged-...``   one that was refused when a save found it in its way, kept to be looked at
``step-12.deleting-...``  one that is being deleted
========================  ====================================================================================
"""

import atexit
import math
import os
import secrets
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ppfunc import _logs
from ppfunc._checks import naming_arguments, require_type
from ppfunc.runtime.lowering.comparison import checksum, differences
from ppfunc.stage.layout import local, whole
from ppfunc.stage.process import hold_interrupts

from ..update.state import CODES, DTYPES, TrainState, require_not_donated
from .naming import Leaf, Names, escaped, named_leaves
from .peers import CheckpointError, Group, Peers
from .storage import (
    MANIFEST,
    Box,
    Contents,
    Part,
    Stored,
    Value,
    box_of,
    checkpoints,
    flush_folder,
    manifest_text,
    new_file,
    on_the_way,
    open_checkpoint,
    require_storable,
    require_tiled,
    step_of,
    verify,
    write_at,
    write_tensors,
)

log = _logs.room("checkpoint")
Leaves = Sequence[tuple[str, Leaf]]


@naming_arguments
def save(
    folder: str | Path,
    state: Any,
    keep: int | None = 3,
    *,
    step: int | None = None,
    names: Names = None,
    group: Group = None,
    run: str | None = None,
) -> Path:
    """Write a state to ``folder/step-N``. The checkpoint appears when it is complete and flushed.

    All ranks call it between steps, each with its own part of the state; a handler of a signal sets a flag
    for that. A plain tensor is the same on all ranks that hold it. Each element is written once. The
    checkpoint can be loaded into any state with the same names, under another schedule, sharding or number
    of ranks; with ``names``, also into other stages.

    Args:
        folder: folder of all checkpoints of a run, on a disk that all ranks share.
        state: a tree of tensors, numbers and texts, such as a :class:`ppfunc.TrainState`, or a dictionary of
            one and the position in the data.
        keep: number of checkpoints that stay; those of the earliest steps are deleted. None keeps all. A
            checkpoint counts if its files have their sizes. Their bytes are not read again: with 1, nothing
            is left to fall back to if the disk damages the last one.
        step: number of the checkpoint; by default the leaf of the state that is called ``step``, or else that
            of the one TrainState in it, which does not count skipped updates.
        names: names of the parameters that do not depend on the stages: a :class:`ppfunc.Split`,
            ``{stage: {name of a leaf: name in the model}}``, or such a function of stage and name. By default
            a name has its stage, and is loaded into the same stages only.
        group: the ranks that save: a mesh or a process group; by default all, or this process where
            ``torch.distributed`` is not initialised.
        run: a text that names the run, such as an id of the job; a folder holds the checkpoints of one run.

    Returns:
        The folder of the checkpoint.

    Raises:
        FileExistsError: a good checkpoint of this step, or of a later one, is there. Damaged ones are put
            aside.
        ValueError, TypeError: names, shapes or values that do not fit together, which are named; a folder of
            another run.
        CheckpointError: another rank is gone, or has failed in another way.
        OSError: the disk of this rank is full, or does not work.

    One job at a time saves into a folder: a save deletes what other writers have begun there.

    >>> import tempfile, ppfunc as pp
    >>> with tempfile.TemporaryDirectory() as runs:
    ...     path = save(runs, {"w": torch.ones(2), "batch": 7}, step=1)
    ...     path.name, pp.checkpoint.load(runs, like={"w": torch.zeros(2), "batch": 0})
    ('step-1', {'w': tensor([1., 1.]), 'batch': 7})
    """
    _end_last()
    with ExitStack() as stack:
        _, finish = _begin(stack, folder, state, keep, step, names, group, run, lambda part: part)
        return finish()


@naming_arguments
def save_async(
    folder: str | Path,
    state: Any,
    keep: int | None = 3,
    *,
    step: int | None = None,
    names: Names = None,
    group: Group = None,
    run: str | None = None,
) -> Future[Path]:
    """Begin to save a state as :func:`save` does. Return once it is copied to the memory of the host.

    A thread does the rest, over links of its own, while training goes on. One save is under way at a time.
    The next one, and the end of the program, wait for it, and warn if it has failed.

    Args:
        folder, state, keep, step, names, group, run: arguments as for :func:`save`.

    Returns:
        The future of the folder. Call ``result`` of the last one before ``destroy_process_group``.
    """

    def copied(part: Tensor) -> Tensor:
        return torch.empty(part.shape, dtype=part.dtype, device="cpu").copy_(part.detach())

    with _lock, ExitStack() as stack:
        _end_last()
        target, finish = _begin(stack, folder, state, keep, step, names, group, run, copied)
        rest, saving = stack.pop_all(), Future[Path]()
        saving.set_running_or_notify_cancel()

        def work() -> None:
            try:
                with rest:
                    path = finish()
                saving.set_result(path)
            except BaseException as error:
                saving.set_exception(error)

        threading.Thread(target=work, name=f"ppfunc {target.name}").start()
        _under_way.append((target, saving))
        return saving


_lock = threading.RLock()  # held while a save begins
_under_way: list[tuple[Path, Future[Path]]] = []  # at most one


@atexit.register
def _end_last() -> None:
    """Wait for the save of this process that is under way, and warn if it has failed."""
    with _lock:
        failures = [(target, saving.exception()) for target, saving in _under_way]
        _under_way.clear()  # not before: who interrupts the wait may save again
        for target, error in failures:
            if error is not None:
                warnings.warn(f"{target} was not saved: {type(error).__name__}: {error}", stacklevel=3)


def _begin(
    stack: ExitStack,
    folder: str | Path,
    state: Any,
    keep: int | None,
    step: int | None,
    names: Names,
    group: Group,
    run: str | None,
    copy: Callable[[Tensor], Tensor],
) -> tuple[Path, Callable[[], Path]]:
    """Agree on a plan: the folder, and the rest of the save, for which the state is not needed any more."""
    peers = stack.enter_context(Peers(group))
    require_type("folder", folder, str | os.PathLike, "a path first, save(folder, state)")
    root = Path(folder).absolute()

    def look() -> tuple[Path, Leaves, dict[str, Any]]:
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ValueError(
                f"keep: got {keep!r}, expected a number of checkpoints, at least 1, or None for all"
            )
        if run is not None and (type(run) is not str or not run):
            raise TypeError(f"run: got {run!r}, expected a text that names the run, or None")
        leaves = named_leaves(state, names, "state")[0]
        target = root / f"step-{(number := _step(state, leaves, step))}"
        if peers.rank == 0:
            if (root / MANIFEST).exists():
                raise ValueError(
                    f"folder: {root} is a checkpoint itself; give the folder in which there is one for each"
                    " step"
                )
            _require_run(root, run)
            _clear_way(target)
        return target, leaves, {"step": number, "run": run}

    work = agree(peers, stack, look, copy)

    def put() -> Any:
        return write_tensors(work.draft / _file_name(peers.rank, peers.size), work.mine)

    def commit(records: Sequence[Any]) -> None:
        written = {_file_name(n, len(records)): record for n, record in enumerate(records) if record}
        headers = [Part(Box((), ()), file, *places["__metadata__"]) for file, places in written.items()]
        tensors = {
            name: stored._replace(
                parts=tuple(Part(box, file, *written[file][name]) for box, file, *_ in stored.parts)
            )
            for name, stored in work.contents.tensors.items()
        }
        contents = work.contents._replace(tensors=tensors, headers=headers, **work.facts)
        with new_file(work.draft / MANIFEST) as file:
            write_at(file, manifest_text(contents))
        _clear_way(work.target)
        publish(work)
        try:
            clean(work.target, keep)
        except (OSError, CheckpointError) as error:  # the checkpoint is there
            warnings.warn(
                f"{work.target} is saved, but old checkpoints could not be deleted: {error}", stacklevel=2
            )

    return work.target, lambda: write(peers, work, put, commit)


def _file_name(rank: int, ranks: int) -> str:
    return f"{rank + 1:05}-of-{ranks:05}.safetensors"


def _step(state: Any, leaves: Leaves, step: Any) -> int:
    """Take the step that is given, or the leaf called ``step``, or the step of the only training state.

    Raise ValueError for a training state that a step has written into.
    """
    parts = optree.tree_leaves(state, is_leaf=lambda part: isinstance(part, TrainState))
    states = [part for part in parts if isinstance(part, TrainState)]
    for training_state in states:
        require_not_donated(training_state)
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


def _require_run(root: Path, run: str | None) -> None:
    """Raise ValueError where the latest readable checkpoint in a folder is of another run."""
    for path in checkpoints(root):
        with suppress(CheckpointError):
            if (other := open_checkpoint(path).run) != run:
                raise ValueError(
                    f"run: got {run!r}, and {path} is a checkpoint of the run {other!r}; save into another"
                    " folder, or go on with that run"
                )
            return


def _clear_way(target: Path) -> None:
    """Put aside damaged checkpoints of the step of ``target`` and of later steps.

    Raises:
        FileExistsError: one of them is good.
    """
    for path in checkpoints(target.parent):
        if (step_of(path) or 0) < (step_of(target) or 0):
            break
        with suppress(CheckpointError):
            verify(path)
            raise FileExistsError(
                f"cannot save {target.name}: {path} is a valid checkpoint of this or a later step; go on from"
                " the latest, save into another folder, or delete it"
            )
        os.rename(path, path.with_name(f"{path.name}.damaged-{secrets.token_hex(8)}"))
        flush_folder(path.parent)


def clean(written: Path, keep: int | None) -> None:
    """Delete leftovers of other writers, and all checkpoints but ``written`` and the latest ``keep``.

    A checkpoint counts as complete by the names and sizes of its files: bytes are not read again. Incomplete
    ones do not count, and are deleted if they are earlier than the last that is kept.
    """
    root, count = written.parent, 0
    for entry in list(os.scandir(root)):
        if on_the_way(Path(entry.path)):
            shutil.rmtree(entry.path, ignore_errors=True)
    for path in checkpoints(root) if keep else ():
        if path.is_symlink() or not path.is_dir():  # somebody else's: a load names it
            continue
        if keep is not None and count >= keep and path != written:
            with suppress(FileNotFoundError):  # another save deletes it as well
                # At once for those who look for one.
                gone = path.with_name(f"{path.name}.deleting-{secrets.token_hex(8)}")
                os.rename(path, gone)
                flush_folder(root)
                shutil.rmtree(gone, ignore_errors=True)
                log.info("removed %s, since the last %d stay", path, keep)
            continue
        with suppress(CheckpointError):
            count += path == written or bool(open_checkpoint(path))


# -- a folder that all ranks write together


class Work(NamedTuple):
    """Describe a folder that all ranks are to write.

    Args:
        target, draft: the folder, and where it is written.
        contents: the plan of all ranks, without places in files.
        mine: the boxes that this rank writes, by name.
        sums: name, offset and checksum of the boxes of this rank that several leaves hold.
        facts: facts in which ranks agree, by name.
    """

    target: Path
    draft: Path
    contents: Contents
    mine: dict[str, Tensor]
    sums: list[list[Any]]
    facts: dict[str, Any]


def agree(
    peers: Peers,
    stack: ExitStack,
    look: Callable[[], tuple[Path, Leaves, dict[str, Any]]],
    copy: Callable[[Tensor], Tensor],
    gathered: bool = False,
) -> Work:
    """Agree on the rank that writes each part, into a draft that lasts as long as ``stack``.

    Args:
        look: check the arguments of this rank; return the folder, the leaves, and facts to agree in.
        copy: ``(part) -> part to write``, such as a copy on the host.
        gathered: whether to write tensors that lie over a mesh whole; ranks gather them one after the other.

    Raises:
        ValueError: ranks hold one name with other shapes, dtypes or values, or other facts, or their parts
            leave a gap or overlap.
    """
    found: list[tuple[Path, Leaves]] = []

    def describe() -> Any:
        target, leaves, facts = look()
        found.append((target, leaves))
        draft = stack.enter_context(_draft(target)).name if peers.rank == 0 else ""
        return draft, facts, [_form(name, leaf, gathered) for name, leaf in leaves]

    answers = peers.together(describe)
    target, leaves = found[0]
    for key, (_, ours), (rank, theirs) in differences((n, facts) for n, (_, facts, _) in enumerate(answers)):
        raise ValueError(
            f"{key}: rank 0 saves {key} {ours!r}, rank {rank} saves {key} {theirs!r}; give all ranks the same"
        )
    contents, shared = _plan([forms for *_, forms in answers])
    mine: dict[str, Tensor] = {}
    sums: list[list[Any]] = []
    for name, leaf in leaves:
        if isinstance(leaf, Tensor):
            box = Box.of_whole(leaf.shape) if gathered else box_of(leaf, name)
            part = whole(leaf.detach()) if gathered else local(leaf)
            if (name, box) in shared:
                sums.append([name, box.offset, int(checksum(part))])
            own = Part(box, _file_name(peers.rank, peers.size))
            if name not in mine and own in contents.tensors[name].parts:
                mine[name] = copy(part)
    return Work(target, target.with_name(answers[0][0]), contents, mine, sums, answers[0][1])


def _form(name: str, leaf: Leaf, gathered: bool) -> list[Any]:
    """Describe a leaf in JSON: name and value, or name, dtype, whole shape, offset and shape of this part."""
    if not isinstance(leaf, Tensor):
        return [name, leaf]
    require_storable(local(leaf), escaped(name))
    box = Box.of_whole(leaf.shape) if gathered else box_of(leaf, escaped(name))
    return [name, CODES[leaf.dtype], leaf.shape, *box]


def _plan(answers: Sequence[Sequence[Any]]) -> tuple[Contents, set[tuple[str, Box]]]:
    """Assign every part to the rank that writes it, from the forms of all ranks; the same on every rank.

    Returns:
        The contents, and the boxes that several leaves hold, whose values have to be the same.
    """
    holders: dict[tuple[str, Box], list[int]] = {}
    tensors: dict[str, Stored] = {}
    values: dict[str, Value] = {}
    seen: list[tuple[int, dict[str, str]]] = []
    for rank, (name, *form) in ((rank, form) for rank, forms in enumerate(answers) for form in forms):
        if len(form) == 1:
            values[name] = form[0]
            seen.append((rank, {name: repr(form[0])}))
        else:
            dtype, shape, *box = form
            tensors[name] = Stored(DTYPES[dtype], tuple(shape))
            holders.setdefault((name, Box(*map(tuple, box))), []).append(rank)
            seen.append((rank, {name: str(tensors[name])}))
    for name, (one, known), (other, text) in differences(seen):
        raise ValueError(
            f"{escaped(name)} is {known} on rank {one}, and {text} on rank {other}; expected the same"
        )
    sizes = {(n, box): math.prod(box.shape) * tensors[n].dtype.itemsize for n, box in holders}
    parts: dict[str, list[Part]] = {name: [] for name in tensors}
    load = [0] * len(answers)
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):  # each to the rank that has least so far
        name, box = key
        if sizes[key] or box == Box.of_whole(tensors[name].shape):
            writer = min(holders[key], key=lambda rank: (load[rank], rank))
            load[writer] += sizes[key]
            parts[name].append(Part(box, _file_name(writer, len(answers))))
    for name, stored in tensors.items():
        require_tiled((part.box for part in parts[name]), stored.shape, escaped(name))
        tensors[name] = stored._replace(parts=tuple(sorted(parts[name])))
    return Contents(tensors, values), {key for key, ranks in holders.items() if len(ranks) > 1}


def write(peers: Peers, work: Work, put: Callable[[], Any], commit: Callable[[Sequence[Any]], None]) -> Path:
    """Write the folder, on all ranks.

    Args:
        put: write the files of this rank; its result, JSON, goes to the first rank.
        commit: ``(results)``: on the first rank, write what tells of all files, and publish the folder.
    """

    def write_own() -> Any:
        record = None
        if work.mine:
            if not work.draft.is_dir():
                raise CheckpointError(
                    f"{work.draft}, which the first rank has made, is not there; give a folder that all"
                    " ranks share"
                )
            record = put()
            flush_folder(work.draft)
        return record, work.sums

    answers = peers.together(write_own)

    def finish() -> None:
        if peers.rank == 0:
            bits = [
                (n, {(name, *at): bits}) for n, (_, sums) in enumerate(answers) for name, at, bits in sums
            ]
            for (name, *_), (one, _), (other, _) in differences(bits):
                where = f"in two places of rank {one}"
                if one != other:
                    where = f"on rank {one} and on rank {other}"
                raise ValueError(
                    f"{escaped(name)} has other values {where}; parts of one tensor have to be DTensors, and"
                    " different tensors need different names"
                )
            commit([record for record, _ in answers])

    with hold_interrupts():  # what one rank has committed is saved on all
        peers.together(finish)
    return work.target


@contextmanager
def _draft(target: Path) -> Iterator[Path]:
    """Make the folder in which a folder is written, and delete it unless it was published."""
    draft = target.with_name(f"{target.name}.writing-{secrets.token_hex(8)}")
    for path in reversed([path for path in draft.parents if not path.exists()]):
        with suppress(FileExistsError):
            os.mkdir(path)
        flush_folder(path.parent)
    os.mkdir(draft)
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def publish(work: Work) -> None:
    """Make the folder appear, once all that is in it is on the disk."""
    flush_folder(work.draft)
    os.rename(work.draft, work.target)
    flush_folder(work.target.parent)
    log.info("wrote %s", work.target)
