"""Read the tensors of a checkpoint with their digests, and find the latest good checkpoint."""

import os
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from .errors import CheckpointError, RankError, escaped
from .folders import checkpoints, flush_folder, open_checkpoint, step_of
from .manifest import Box, Contents, StoredPart
from .tensor_file import TensorFile, open_tensors
from .threads import in_threads

T = TypeVar("T")


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
    """Read a part of a tensor into this rank's part of it, the box ``box``; or nowhere."""

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
    """Raise CheckpointError unless a file has the header that was written, and these parts of tensors."""
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
