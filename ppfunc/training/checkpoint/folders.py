"""Keep the folders of checkpoints: one per step, which appears and disappears as a whole, by a rename.

The latest good one is found by the digests of its tensors.

========================  ====================================================================================
``step-12``               a checkpoint
``step-12.writing-...``   one that is being written, or that a dead writer has left
``step-12.damaged-...``   one that was refused when a save found it in its way, kept to be looked at
``step-12.deleting-...``  one that is being deleted
========================  ====================================================================================
"""

import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from .errors import CheckpointError, RankError, escaped, reading
from .manifest import MANIFEST, Box, Contents, StoredPart, read_manifest
from .tensor_file import TensorFile, open_plain, open_tensors
from .threads import in_threads

T = TypeVar("T")
_STEP = re.compile(r"step-(0|[1-9]\d{0,18})", re.ASCII)
_ON_THE_WAY = re.compile(r"step-\d+\.(writing|deleting)-[0-9a-f]+", re.ASCII)


def step_of(folder: Path) -> int | None:
    """Read the step from the name of a folder; None for another name.

    >>> step_of(Path("runs/step-12")), step_of(Path("runs/step-12.writing-a0"))
    (12, None)
    """
    match = _STEP.fullmatch(folder.name)
    return None if match is None else int(match[1])


def on_the_way(folder: Path) -> str | None:
    """Return ``writing`` or ``deleting`` by the name of a folder; None for any other."""
    match = _ON_THE_WAY.fullmatch(folder.name)
    return None if match is None else match[1]


def checkpoints(root: Path) -> list[Path]:
    """List the checkpoints in a folder, good or not, the latest first; a file of such a name is not good."""
    with reading(root):
        paths = [Path(entry.path) for entry in os.scandir(root)] if root.is_dir() else []
    steps = {path: step for path in paths if (step := step_of(path)) is not None}
    return sorted(steps, key=steps.__getitem__, reverse=True)


def flush_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def make_folder(root: Path) -> None:
    """Make a folder, and the folders around it, on the disk."""
    for path in reversed([path for path in (root, *root.parents) if not path.exists()]):
        with suppress(FileExistsError):
            os.mkdir(path)
        flush_folder(path.parent)


def writing(target: Path, nonce: str) -> Path:
    """Name the folder in which a checkpoint is written."""
    return target.with_name(f"{target.name}.writing-{nonce}")


@contextmanager
def draft(target: Path) -> Iterator[str]:
    """Make the folder in which a checkpoint is written, and yield its nonce; delete it unless it was
    committed.

    Args:
        target: the folder of the checkpoint.
    """
    root, nonce = target.parent, secrets.token_hex(8)
    if (root / MANIFEST).exists():
        raise ValueError(
            f"folder: {root} is a checkpoint itself; give the folder in which there is one for each step"
        )
    make_folder(root)
    os.mkdir(writing(target, nonce))
    try:
        yield nonce
    finally:
        shutil.rmtree(writing(target, nonce), ignore_errors=True)


def clean(written: Path, keep: int | None) -> None:
    """Delete what other writers have left around a checkpoint, and all checkpoints but this one and the
    latest ``keep`` complete ones.

    A checkpoint counts as complete by the names and sizes of its files: bytes are not read again. Incomplete
    ones do not count, and are deleted if they are earlier than the last that is kept.
    """
    root, count = written.parent, 0
    for entry in list(os.scandir(root)):
        if on_the_way(Path(entry.path)):
            shutil.rmtree(entry.path, ignore_errors=True)
    if keep is None:
        return
    for path in checkpoints(root):
        if path.is_symlink() or not path.is_dir():  # somebody else's: a load names it
            continue
        if path == written or (count < keep and is_complete(path)):
            count += 1
        elif count >= keep:
            with suppress(FileNotFoundError):  # another save deletes it as well
                # At once for those who look for one.
                gone = path.with_name(f"{path.name}.deleting-{secrets.token_hex(8)}")
                os.rename(path, gone)
                flush_folder(root)
                shutil.rmtree(gone, ignore_errors=True)


def open_checkpoint(folder: Path) -> Contents:
    """Read the manifest of a checkpoint, and check, without reading tensors, that all of its files are there.

    Raises:
        CheckpointError: a file is lost or cut, or the checkpoint is that of another step, or cannot be read.
    """
    with reading(folder):  # another save may delete it
        if not folder.is_dir():
            raise CheckpointError(f"{escaped(folder)} is no folder")
        if on_the_way(folder):
            raise CheckpointError(f"{escaped(folder.name)} was not committed")
        contents = read_manifest(folder)
        for name, (expected, _) in contents.files.items():
            with open_plain(folder, name) as (_, size):
                if size != expected:
                    raise CheckpointError(
                        f"{escaped(f'{folder.name}/{name}')} has {size} bytes, expected {expected}"
                    )
    if step_of(folder) not in (None, contents.step):
        raise CheckpointError(
            f"{escaped(folder.name)} holds the checkpoint of step {contents.step}; give it that name"
        )
    return contents


def require_run(root: Path, run: str | None) -> None:
    """Raise ValueError where the latest checkpoint in a folder that can be read is one of another run."""
    for path in checkpoints(root):
        with suppress(CheckpointError):
            if (other := open_checkpoint(path).run) != run:
                raise ValueError(
                    f"run: got {run!r}, and {path} is a checkpoint of the run {other!r}; save into another"
                    " folder, or go on with that run"
                )
            return


def is_complete(folder: Path) -> bool:
    """Tell whether a checkpoint is complete, without reading tensors."""
    with suppress(CheckpointError):
        open_checkpoint(folder)
        return True
    return False


# -- the bytes of a checkpoint


def latest(folder: str | Path) -> Path | None:
    """Find the latest checkpoint in a folder whose bytes are all as they were written.

    This process alone reads and verifies it. :func:`load` does the same, with each rank reading its own part.

    Args:
        folder: the folder given to :func:`save`.

    Returns:
        The folder of the checkpoint; None if there are no checkpoints.

    Raises:
        CheckpointError: all checkpoints are damaged, or cannot be read.
    """
    good = first_good(checkpoints(Path(folder)), verify, folder)
    return None if good is None else good.folder


def first_good(paths: Iterable[Path], read: Callable[[Path], T], folder: object) -> T | None:
    """Return the result of ``read`` for the first checkpoint that it accepts, or None without checkpoints.

    Warns of each checkpoint that it refuses.

    Raises:
        CheckpointError: it refuses all.
    """
    refused: list[str] = []
    for path in paths:
        try:
            result = read(path)
        except RankError:
            raise
        except CheckpointError as error:
            refused.append(str(error))
            continue
        if refused:
            warnings.warn(
                f"{path} is the latest good checkpoint; refused: {'; '.join(refused)}", stacklevel=4
            )
        return result
    if refused:
        raise CheckpointError(f"{folder} has no good checkpoint; refused: {'; '.join(refused)}")
    return None


def verify(folder: Path) -> Contents:
    """Read a checkpoint, and raise CheckpointError unless every byte is as it was written."""
    contents = open_checkpoint(folder)
    tensors = contents.tensors.items()
    read_parts(
        contents,
        [PartToRead(name, part, None, part.box) for name, stored in tensors for part in stored.parts],
    )
    return contents


class PartToRead(NamedTuple):
    """Describe a part of a tensor to read into this rank's part of it, the box ``box``; or nowhere."""

    name: str
    part: StoredPart
    into: torch.Tensor | None
    box: Box


def read_parts(contents: Contents, parts: Iterable[PartToRead]) -> None:
    """Read parts of tensors, and raise CheckpointError unless their bytes are those that were written."""
    files: dict[str, list[PartToRead]] = {}
    for task in parts:
        files.setdefault(task.part.file, []).append(task)

    def read(name: str) -> None:
        with open_tensors(contents.folder, name) as file:
            _require_written(contents, name, file, files[name])
            in_threads(partial(_read, file), files[name])

    in_threads(read, list(files))


def _require_written(contents: Contents, name: str, file: TensorFile, parts: Iterable[PartToRead]) -> None:
    if contents.files[name][1] != file.header:
        raise CheckpointError(
            f"{escaped(file.name)} has another header than the one that was written: damaged, or of another"
            " checkpoint"
        )
    for tensor, part, *_ in parts:
        dtype, span = contents.tensors[tensor].dtype, file.spans.get(tensor)
        if span is None or (span.dtype, span.shape) != (dtype, part.box.shape):
            got = "nothing" if span is None else f"{span.dtype}{list(span.shape)}"
            raise CheckpointError(
                f"{escaped(file.name)} has {got} as tensor {escaped(tensor)}, expected"
                f" {dtype}{list(part.box.shape)}"
            )


def _read(file: TensorFile, task: PartToRead) -> None:
    """Read a part of a tensor, verify it, and copy what this rank holds of it."""
    name, part, into, box = task
    whole = into
    if into is not None and not (part.box == box and into.device.type == "cpu" and into.is_contiguous()):
        whole = torch.empty(part.box.shape, dtype=into.dtype, device="cpu")
    if file.read(name, whole) != part.digest and part.digest is not None:
        raise CheckpointError(
            f"tensor {escaped(name)} in {escaped(file.name)} has other bytes than were written: its digest"
            " differs"
        )
    if into is not whole and into is not None and whole is not None and (shared := part.box & box):
        into[shared.within(box)] = whole[shared.within(part.box)].to(into.device)


def clear_way(target: Path, nonce: str) -> None:
    """Put aside the damaged checkpoints of the step of ``target`` and of later ones.

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
        os.rename(path, path.with_name(f"{path.name}.damaged-{nonce}"))
        flush_folder(path.parent)
