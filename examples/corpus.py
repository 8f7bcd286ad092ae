"""Text that every machine with Python has: the sources of its standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# Modules that every Python since 3.11 has under the same name, and that change little, so that
# two machines read nearly the same text. One that is missing is skipped.
MODULES = """
    argparse ast base64 bdb calendar cmd codecs configparser contextlib copy csv dataclasses difflib
    dis doctest enum filecmp fractions ftplib functools getopt gettext glob gzip heapq imaplib inspect
    ipaddress locale mailbox mimetypes ntpath optparse pdb pickle pickletools platform plistlib
    poplib posixpath pprint profile pstats pydoc random selectors shelve shlex shutil smtplib socket
    socketserver ssl statistics string subprocess tabnanny tarfile tempfile textwrap threading
    timeit tokenize trace traceback turtle types uuid wave weakref zipapp
""".split()
SIZE = 1_500_000
HELD_OUT = 150_000


class Corpus(NamedTuple):
    """Two texts, uint8[n] each, that share no module."""

    train: Tensor
    validation: Tensor


class Windows(NamedTuple):
    """Pieces of a text, int64[b, t] each: the targets are the inputs one byte later."""

    inputs: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> Windows:
        """The same pieces on a device."""
        return Windows(*(t.to(device) for t in self))


def load(size: int = SIZE, held_out: int = HELD_OUT) -> Corpus:
    """The first ``size`` bytes of the modules one after the other; the last ``held_out`` of them validate.

    Raises:
        FileNotFoundError: if this Python has no readable sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = [folder / f"{name}.py" for name in MODULES]
    text = b"".join(f.read_bytes() for f in files if f.is_file())[:size]
    if len(text) < 2 * held_out:
        raise FileNotFoundError(
            f"found {len(text)} bytes of Python sources in {folder}, expected at least {2 * held_out}; "
            "use a Python that comes with the sources of its standard library"
        )
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Corpus(data[:-held_out], data[-held_out:])


def read(file: Path) -> Corpus:
    """The bytes of a file; the last tenth of them validates."""
    size = file.stat().st_size
    data = torch.from_file(str(file), size=size, dtype=torch.uint8)  # mapped, not read as a whole
    return Corpus(data[: -(size // 10)], data[-(size // 10) :])


def require_usable(file: Path, length: int) -> None:
    """Raise ValueError where no windows of this length can be cut from the text of a file."""
    if not file.is_file():
        raise ValueError(f"--data: no such file: {file}; pipelines beside each other are --replicas")
    if file.stat().st_size // 10 <= length:
        raise ValueError(
            f"--data: {file} has {file.stat().st_size} bytes, expected more than 10 times --context {length}"
        )


def windows(text: Tensor, starts: Tensor, length: int) -> Windows:
    """The pieces of ``text`` that begin at ``starts``."""
    cut = text[starts[:, None] + torch.arange(length + 1)].long()
    return Windows(cut[:, :-1], cut[:, 1:])


def training_batch(text: Tensor, batch: int, length: int, seed: int, step: int) -> Windows:
    """Random windows that depend on the seed and the step only, so that all ranks draw the same."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    return windows(text, torch.randint(len(text) - length, (batch,), generator=generator), length)


def validation_batch(text: Tensor, batch: int, length: int, number: int) -> Windows:
    """The windows from ``number * batch`` on, side by side; the text begins anew at its end."""
    fitting = (len(text) - 1) // length
    return windows(text, (number * batch + torch.arange(batch)) % fitting * length, length)
