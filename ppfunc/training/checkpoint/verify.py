"""Verify a checkpoint to the last byte, and find the latest good one."""

from __future__ import annotations

import warnings
from pathlib import Path

from .errors import CheckpointError, shown
from .folders import checkpoints, on_the_way, require_whole
from .manifest import Contents, Stored, read_manifest
from .tensor_file import TensorFile, in_threads


def latest(folder: str | Path) -> Path | None:
    """The latest good checkpoint in a folder: the first, from the last step on, whose bytes are all as they were written.

    One process reads and verifies it, without others; :func:`ppfunc.load` does so by itself, and every rank reads what it needs.

    Args:
        folder: that was given to :func:`ppfunc.save`.

    Returns:
        The folder of the checkpoint; None where there is none.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
    """
    refused: list[CheckpointError] = []
    for path in checkpoints(Path(folder)):
        try:
            verify(path)
        except CheckpointError as error:
            refused.append(error)
            continue
        tell_refused(refused, path)
        return path
    require_some(refused, folder)
    return None


def verify(folder: Path) -> None:
    """Read a checkpoint, and raise CheckpointError unless every byte is as it was written."""
    contents = open_checkpoint(folder)
    parts: dict[str, list[tuple[str, Stored, int]]] = {name: [] for name in contents.files}
    for name, stored in contents.tensors.items():
        for number, part in enumerate(stored.parts):
            parts[part.file].append((name, stored, number))

    def read(task: tuple[str, Stored, int]) -> None:
        name, stored, number = task
        file = files[stored.parts[number].file]
        require_digest(file, name, stored, number, file.read(name))

    for file_name, tasks in parts.items():
        with open_part(contents, file_name) as file:
            files = {file_name: file}
            for name, stored, number in tasks:
                require_span(file, name, stored, number)
            if extra := file.spans.keys() - {name for name, _, _ in tasks}:
                raise CheckpointError(f"{shown(file.name)} has the tensor {shown(min(extra))}, which the manifest does not have there")
            in_threads(read, tasks)


def open_checkpoint(folder: Path) -> Contents:
    """The manifest of a checkpoint whose files are there."""
    if not folder.is_dir() or folder.is_symlink():
        raise CheckpointError(f"{shown(folder)} is no folder, or a link")
    if on_the_way(folder):
        raise CheckpointError(f"{shown(folder.name)} was not committed")
    contents = read_manifest(folder)
    require_whole(contents)
    return contents


def open_part(contents: Contents, name: str) -> TensorFile:
    """A file of a checkpoint, whose header is as it was written."""
    file = TensorFile(contents.folder, name)
    header = contents.files[name][1]
    if header not in (None, file.header):
        file.close()
        raise CheckpointError(f"{shown(file.name)} has another header than the one that was written: damaged, or of another checkpoint")
    return file


def require_span(file: TensorFile, name: str, stored: Stored, number: int) -> None:
    """Raise CheckpointError unless a file has this part of a tensor."""
    span, box = file.spans.get(name), stored.parts[number].box
    if span is None or (span.dtype, span.shape) != (stored.dtype, box.shape):
        got = "nothing" if span is None else f"{span.dtype}{list(span.shape)}"
        raise CheckpointError(f"{shown(file.name)} has {got} as tensor {shown(name)}, expected {stored.dtype}{list(box.shape)}")


def require_digest(file: TensorFile, name: str, stored: Stored, number: int, digest: str) -> None:
    """Raise CheckpointError where the bytes of a part are not those that were written."""
    if stored.parts[number].digest not in (None, digest):
        raise CheckpointError(f"tensor {shown(name)} in {shown(file.name)} has other bytes than were written: its digest differs")


def is_good(folder: Path) -> bool:
    """Whether a checkpoint is good."""
    try:
        verify(folder)
    except CheckpointError:
        return False
    return True


def tell_refused(refused: list[CheckpointError], taken: Path) -> None:
    """Warn of later checkpoints that are damaged."""
    if refused:
        told = "; ".join(map(str, refused))
        warnings.warn(f"{taken} is the latest good checkpoint; refused: {told}", stacklevel=3)


def require_some(refused: list[CheckpointError], folder: str | Path) -> None:
    """Raise where all checkpoints are damaged."""
    if refused:
        raise CheckpointError(f"{folder} has no good checkpoint; refused: {'; '.join(map(str, refused))}")
