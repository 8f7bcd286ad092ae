"""Keep the folders of checkpoints: one per step, which appears whole by a rename, and old ones that go the same way.

========================  ====================================================================================
``step-12``               a checkpoint
``step-12.writing-...``   one that is being written, locked by its writer; without a lock its writer is dead
``step-12.damaged-...``   one that was refused when a save found it in its way, kept to be looked at
``step-12.deleting-...``  one that is being deleted
========================  ====================================================================================
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from .errors import CheckpointError, escaped, reading
from .manifest import MANIFEST, Contents, read_manifest
from .tensor_file import open_plain

_STEP = re.compile(r"step-(0|[1-9]\d{0,18})", re.ASCII)
_ON_THE_WAY = re.compile(r"step-\d+\.(writing|deleting)-[0-9a-f]+", re.ASCII)


def step_of(folder: Path) -> int | None:
    """Read the step from the name of a folder; None for another name.

    >>> step_of(Path("runs/step-12")), step_of(Path("runs/step-12.writing-a0"))
    (12, None)
    """
    found = _STEP.fullmatch(folder.name)
    return None if found is None else int(found[1])


def on_the_way(folder: Path) -> str | None:
    """Tell whether a folder is one that is being ``writing`` or ``deleting``; None for neither."""
    found = _ON_THE_WAY.fullmatch(folder.name)
    return None if found is None else found[1]


def is_stray(name: str) -> bool:
    """Tell whether a file is one that nothing reads, such as file systems and viewers leave behind: its name begins with a dot.

    Not ``.metadata``, which torch.distributed.checkpoint would unpickle.

    >>> [name for name in (".DS_Store", ".nfs0001", ".metadata", "x.pkl") if is_stray(name)]
    ['.DS_Store', '.nfs0001']
    """
    return name.startswith(".") and name != ".metadata"


def checkpoints(root: Path) -> list[Path]:
    """List the checkpoints in a folder, good or not, the latest first; a link or a file by such a name is one that is not good."""
    with reading(root):
        found = [Path(entry.path) for entry in os.scandir(root)] if root.is_dir() else []
    return sorted((path for path in found if step_of(path) is not None), key=lambda path: -(step_of(path) or 0))


def flush_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


class Draft:
    """A checkpoint that is being written; a context manager that deletes it unless it was committed.

    Args:
        root: the folder of checkpoints, made where there is none.
        step: of the checkpoint.
    """

    def __init__(self, root: Path, step: int) -> None:
        if (root / MANIFEST).exists():
            raise ValueError(f"folder: {root} is a checkpoint itself; give the folder in which there is one for each step")
        self.target = root / f"step-{step}"
        make_folder(root)
        self._lock = -1
        while self._lock < 0:  # a save beside this one may delete the folder before it is locked
            self.nonce = secrets.token_hex(8)
            self.folder = writing(self.target, self.nonce)
            os.mkdir(self.folder)
            self._lock = _locked(self.folder)

    def seal(self, contents: Contents, text: bytes) -> None:
        """Write the manifest, and flush it.

        Args:
            contents: that the ranks have written.
            text: of the manifest.

        Raises:
            CheckpointError: a file that another rank has written is not here.
        """
        for name, (size, _) in contents.files.items():
            if not (self.folder / name).exists() or os.stat(self.folder / name).st_size != size:
                raise CheckpointError(f"{self.folder / name} is not as a rank has written it; give a folder that all ranks share")
        file = os.open(self.folder / MANIFEST, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            memory = memoryview(text)
            while len(memory):
                memory = memory[os.write(file, memory) :]
            os.fsync(file)
        finally:
            os.close(file)
        flush_folder(self.folder)

    def commit(self) -> None:
        """Make the checkpoint appear, once it is sealed.

        Raises:
            FileExistsError: another has saved this step at the same time.
        """
        try:
            os.rename(self.folder, self.target)
        except OSError as error:
            if self.target.exists():
                raise FileExistsError(f"{self.target} has been saved by another at the same time") from error
            raise
        self._unlock()
        flush_folder(self.target.parent)

    def _unlock(self) -> None:
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._lock >= 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._unlock()


def writing(target: Path, nonce: str) -> Path:
    """Name the folder in which a checkpoint is written."""
    return target.with_name(f"{target.name}.writing-{nonce}")


def make_folder(root: Path) -> None:
    """Make a folder, and the folders around it, on the disk."""
    missing = [path for path in (root, *root.parents) if not path.exists()]
    for path in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(path)
        flush_folder(path.parent)


def _locked(folder: Path) -> int:
    """Lock a folder: a descriptor; -1 where another has it, or it is gone."""
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if folder.exists():
            return file
    except BlockingIOError:
        pass
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return -1


def clean(written: Path, keep: int | None) -> None:
    """Delete what dead writers have left around a checkpoint, and all checkpoints but this one and the latest ``keep`` complete ones.

    Complete is told by names and sizes: bytes are not read again. One that is not complete does not count, and is deleted with those
    before the last that is kept. Whether a writer is dead is told by its lock, which a network file system may keep to its host:
    two jobs on different hosts should not save into one folder.
    """
    root = written.parent
    for entry in list(os.scandir(root)):
        if on_the_way(Path(entry.path)) and entry.is_dir(follow_symlinks=False) and (lock := _locked(Path(entry.path))) >= 0:
            shutil.rmtree(entry.path, ignore_errors=True)
            os.close(lock)
    if keep is None:
        return
    kept = 0
    for path in checkpoints(root):
        if path.is_symlink() or not path.is_dir():  # somebody else's, to whom a load tells it
            continue
        if path != written and kept >= keep:
            with suppress(FileNotFoundError):  # another save deletes it, too
                _delete(path)
        elif path == written or is_complete(path):
            kept += 1


def _delete(path: Path) -> None:
    """Delete a checkpoint: at once for those who look for one."""
    gone = path.with_name(f"{path.name}.deleting-{secrets.token_hex(8)}")
    os.rename(path, gone)
    flush_folder(path.parent)
    shutil.rmtree(gone, ignore_errors=True)


def require_complete(contents: Contents) -> None:
    """Check, without reading tensors, that all files of a checkpoint are there, and nothing else.

    Raises:
        CheckpointError: a file is lost, cut, a link, foreign, or the checkpoint is that of another step, or cannot be read.
    """
    folder = contents.folder
    with reading(folder):  # another save may delete it
        for name, (size, _) in contents.files.items():
            file = open_plain(folder, name)
            try:
                if (found := os.fstat(file).st_size) != size:
                    raise CheckpointError(f"{escaped(f'{folder.name}/{name}')} has {found} bytes, expected {size}")
            finally:
                os.close(file)
        if foreign := sorted(name for name in os.listdir(folder) if name not in contents.files and name != MANIFEST and not is_stray(name)):
            raise CheckpointError(f"{escaped(f'{folder.name}/{foreign[0]}')} is no part of the checkpoint; take it away")
    if step_of(folder) not in (None, contents.step):
        raise CheckpointError(f"{escaped(folder.name)} holds the checkpoint of step {contents.step}")


def is_complete(folder: Path) -> bool:
    """Tell whether a checkpoint is complete, without reading tensors."""
    try:
        require_complete(read_manifest(folder))
    except CheckpointError:
        return False
    return True
