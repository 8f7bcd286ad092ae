"""Read a schedule from a file of either form, CSV or JSON, whatever the file may hold."""

from os import PathLike
from pathlib import Path

from ..schedule import Schedule
from .csv import from_csv, to_csv
from .json import from_json
from .text import FormatError

LIMIT = 256 * 2**20


def read_schedule(path: str | PathLike[str]) -> Schedule:
    """Read the schedule in the file ``path``: JSON where it begins with ``{``, else CSV. It is not yet checked.

    Raises:
        OSError: the file cannot be read.
        FormatError: it is not text of either form, or larger than 256 MiB.
        ScheduleError: its numbers of stages and microbatches cannot be those of any schedule.
    """
    text = _text(Path(path))
    if text.startswith("rank 0"):
        raise FormatError(f"{path}: a grid or a list of steps, which only people read: expected CSV or JSON (ppfunc show --format)")
    return from_json(text) if text.lstrip().startswith("{") else from_csv(text, Path(path).stem)


def read_csv(path: str | PathLike[str]) -> Schedule:
    """Read the schedule in the CSV file ``path``; raises as :func:`read_schedule`."""
    return from_csv(_text(Path(path)), Path(path).stem)


def write_csv(schedule: Schedule, path: str | PathLike[str]) -> None:
    """Write ``schedule`` to the file ``path`` as CSV (see :mod:`ppfunc.schedule.formats.csv`)."""
    Path(path).write_text(to_csv(schedule), encoding="utf-8", newline="")


def _text(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(LIMIT + 1)
    if len(data) > LIMIT:
        raise FormatError(f"{path}: larger than {LIMIT // 2**20} MiB: no schedule that can be run is")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not text: byte {error.start} is not UTF-8") from None
