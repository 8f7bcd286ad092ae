"""Verify a checkpoint to the last byte, and find the latest good one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from .errors import CheckpointError, escaped, reading
from .folders import checkpoints, flush_folder, on_the_way, require_complete, step_of
from .manifest import Contents, NamedPart, read_manifest
from .tensor_file import TensorFile
from .threads import in_threads


def latest(folder: str | Path) -> Path | None:
    """Find the latest good checkpoint in a folder: the first, from the last step on, whose bytes are all as they were written.

    One process reads and verifies it, without others; :func:`ppfunc.load` does so by itself, and every rank reads what it needs.

    Args:
        folder: that was given to :func:`ppfunc.save`.

    Returns:
        The folder of the checkpoint; None where there is none.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged, or cannot be read.
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
    parts: dict[str, list[NamedPart]] = {name: [] for name in contents.files}
    for part in contents.parts():
        parts[part.part.file].append(part)

    def check(file_name: str) -> None:
        with open_part(contents, file_name, parts[file_name]) as file:
            if extra := file.spans.keys() - {part.name for part in parts[file_name]}:
                raise CheckpointError(f"{escaped(file.name)} has the tensor {escaped(min(extra))}, which the manifest does not have there")
            in_threads(lambda part: require_digest(file, part, file.read(part.name)), parts[file_name])

    in_threads(check, list(parts))


def open_checkpoint(folder: Path) -> Contents:
    """Read the manifest of a checkpoint, and check that its files are there."""
    with reading(folder):
        if not folder.is_dir() or folder.is_symlink():
            raise CheckpointError(f"{escaped(folder)} is no folder, or a link; put the folder itself there")
    if on_the_way(folder):
        raise CheckpointError(f"{escaped(folder.name)} was not committed")
    contents = read_manifest(folder)
    require_complete(contents)
    return contents


def open_part(contents: Contents, name: str, parts: Iterable[NamedPart]) -> TensorFile:
    """Open a file of a checkpoint whose header is as it was written, and which has these parts."""
    with ExitStack() as opened, reading(f"{contents.folder.name}/{name}"):
        file = opened.enter_context(TensorFile(contents.folder, name))
        if contents.files[name][1] not in (None, file.header):
            raise CheckpointError(
                f"{escaped(file.name)} has another header than the one that was written: damaged, or of another checkpoint"
            )
        for part, dtype, (box, _, _) in parts:
            span = file.spans.get(part)
            if span is None or (span.dtype, span.shape) != (dtype, box.shape):
                got = "nothing" if span is None else f"{span.dtype}{list(span.shape)}"
                raise CheckpointError(f"{escaped(file.name)} has {got} as tensor {escaped(part)}, expected {dtype}{list(box.shape)}")
        opened.pop_all()
    return file


def require_digest(file: TensorFile, part: NamedPart, digest: str) -> None:
    """Raise CheckpointError where the bytes of a part are not those that were written."""
    if part.part.digest not in (None, digest):
        raise CheckpointError(f"tensor {escaped(part.name)} in {escaped(file.name)} has other bytes than were written: its digest differs")


def is_good(folder: Path) -> bool:
    """Tell whether a checkpoint is good, to the last byte."""
    try:
        verify(folder)
    except CheckpointError:
        return False
    return True


def clear_way(target: Path, nonce: str) -> None:
    """Put aside the damaged checkpoints of the step of ``target`` and of later ones.

    Raises:
        FileExistsError: one of them is good.
    """
    for path in checkpoints(target.parent):
        if (step_of(path) or 0) < (step_of(target) or 0):
            break
        if is_good(path):
            raise FileExistsError(
                f"{path} is there, and good: {target.name} cannot be saved behind it; "
                "go on from the latest, save into another folder, or delete it"
            )
        os.rename(path, path.with_name(f"{path.name}.damaged-{nonce}"))
        flush_folder(path.parent)


def tell_refused(refused: list[CheckpointError], taken: Path) -> None:
    """Warn of later checkpoints that are damaged."""
    if refused:
        told = "; ".join(map(str, refused))
        warnings.warn(f"{taken} is the latest good checkpoint; refused: {told}", stacklevel=3)


def require_some(refused: list[CheckpointError], folder: str | Path) -> None:
    """Raise where all checkpoints are damaged."""
    if refused:
        raise CheckpointError(f"{folder} has no good checkpoint; refused: {'; '.join(map(str, refused))}")
