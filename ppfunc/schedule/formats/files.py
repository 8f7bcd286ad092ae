"""Read a schedule from a file of any form, CSV, JSON or Chrome trace, whatever the file may hold."""

import stat
from os import PathLike
from pathlib import Path
from typing import BinaryIO

from ..json import from_document, load
from ..proof.timeline import Timeline
from ..schedule import Schedule
from ..text import FormatError
from .csv import from_csv
from .trace import from_trace

LIMIT = 256 * 2**20


def read_schedule(path: str | PathLike[str]) -> Schedule:
    """Read a schedule from a file, unchecked: JSON or a trace if it begins with ``{``, else CSV.

    Raises:
        OSError: the file cannot be read.
        FormatError: it is no text of these forms, no regular file, or larger than 256 MiB.
        ScheduleError: its numbers of stages and microbatches cannot be those of any schedule.
    """
    return parse(read_text(path), Path(path).stem)[0]


def parse(text: str, name: str) -> tuple[Schedule, Timeline | None]:
    """Read a schedule from text, and its times if the text is a trace.

    Raises as :func:`read_schedule`. A schedule whose text has no name gets ``name``.
    """
    if not text.strip():
        raise FormatError(
            "nothing is in it: expected a schedule, as `ppfunc show 1f1b --ranks 4 --microbatches 8 --format"
            " csv` writes one"
        )
    if text.startswith("rank 0"):
        raise FormatError(
            "a grid or a list of steps, which only people read: expected CSV or JSON (ppfunc show --format)"
        )
    if not text.lstrip().startswith("{"):
        return from_csv(text, name), None
    document = load(text)
    if "traceEvents" not in document:
        return from_document(document), None
    timeline = from_trace(document)
    return timeline.schedule, timeline


def read_text(path: str | PathLike[str]) -> str:
    """Read a regular file of text; raises as :func:`read_schedule`."""
    mode = Path(path).stat().st_mode
    # Opening a directory fails, opening a pipe can wait for ever.
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise FormatError(
            f"{path}: a pipe or a device, expected a file; ppfunc reads standard input where its file is"
            " called -"
        )
    with Path(path).open("rb") as file:
        return text_of(file, str(path))


def text_of(file: BinaryIO, name: str) -> str:
    """Read all of ``file``, called ``name`` in errors, within the limit of size."""
    data = file.read(LIMIT + 1)
    if len(data) > LIMIT:
        raise FormatError(f"{name}: larger than {LIMIT:,} bytes: no schedule that can be run is")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{name}: not text: byte {error.start} is not UTF-8") from None
