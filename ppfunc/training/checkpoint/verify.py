"""Read the tensors of a checkpoint with their digests, and find the latest good checkpoint."""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from .errors import CheckpointError, RankError, escaped, reading
from .folders import checkpoints, flush_folder, open_checkpoint, step_of
from .manifest import Contents, StoredPart
from .tensor_file import TensorFile, open_tensors
from .threads import in_threads

T = TypeVar("T")


def latest(folder: str | Path) -> Path | None:
    """Find the latest good checkpoint in a folder: the first, from the last step on, whose bytes are all as
    they were written.

    One process reads and verifies it, without others; :func:`load` does so by itself, and every rank reads
    what it needs.

    Args:
        folder: that was given to :func:`save`.

    Returns:
        The folder of the checkpoint; None if there are no checkpoints.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged, or cannot be read.
    """
    good = first_good(checkpoints(Path(folder)), verify, folder)
    return None if good is None else good.folder


def first_good(paths: Iterable[Path], read: Callable[[Path], T], folder: object) -> T | None:
    """Return what ``read`` returns for the first checkpoint that it does not refuse, with a warning of those
    that it does; None if there are no checkpoints.

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
    parts: dict[str, list[tuple[str, StoredPart]]] = {name: [] for name in contents.files}
    for name, stored in contents.tensors.items():
        for part in stored.parts:
            parts[part.file].append((name, part))

    def check(file_name: str) -> None:
        with open_parts(contents, file_name, parts[file_name]) as file:
            in_threads(lambda named: read_part(file, *named, None), parts[file_name])

    in_threads(check, list(parts))
    return contents


@contextmanager
def open_parts(
    contents: Contents, name: str, parts: Iterable[tuple[str, StoredPart]]
) -> Iterator[TensorFile]:
    """Open a file of a checkpoint whose header is as it was written, and which has these parts of tensors."""
    with reading(f"{contents.folder.name}/{name}"), open_tensors(contents.folder, name) as file:
        if contents.files[name][1] not in (None, file.header):
            raise CheckpointError(
                f"{escaped(file.name)} has another header than the one that was written: damaged, or of"
                " another checkpoint"
            )
        for tensor, part in parts:
            dtype, span = contents.tensors[tensor].dtype, file.spans.get(tensor)
            if span is None or (span.dtype, span.shape) != (dtype, part.box.shape):
                got = "nothing" if span is None else f"{span.dtype}{list(span.shape)}"
                raise CheckpointError(
                    f"{escaped(file.name)} has {got} as tensor {escaped(tensor)}, expected"
                    f" {dtype}{list(part.box.shape)}"
                )
        yield file


def read_part(file: TensorFile, name: str, part: StoredPart, into: Tensor | None) -> None:
    """Read a part of a tensor, or only its bytes; raise CheckpointError unless they are those written."""
    if file.read(name, into) != part.digest and part.digest is not None:
        raise CheckpointError(
            f"tensor {escaped(name)} in {escaped(file.name)} has other bytes than were written: its digest"
            " differs"
        )


def is_good(folder: Path) -> bool:
    """Tell if a checkpoint is good, to the last byte."""
    with suppress(CheckpointError):
        verify(folder)
        return True
    return False


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
                f"cannot save {target.name}: {path} is a valid checkpoint of this or a later step; go on from"
                " the latest, save into another folder, or delete it"
            )
        os.rename(path, path.with_name(f"{path.name}.damaged-{nonce}"))
        flush_folder(path.parent)
