"""Read a schedule from a file (CSV, JSON or Chrome trace), or build the schedule of a configuration."""

import stat
import warnings
from os import PathLike, sep
from pathlib import Path
from typing import Any, BinaryIO

from ppfunc._checks import naming_arguments, require_counts, require_type

from ..builders import find_builder
from ..instruction import FormatError
from ..json import load, read_schedule_at
from ..proof.timeline import Timeline
from ..schedule import Schedule
from .csv import from_csv
from .trace import from_trace

LIMIT = 256 * 2**20


@naming_arguments
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
        return read_schedule_at("$", document), None
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


@naming_arguments
def configure(
    schedule: str | PathLike[str], ranks: int, batch_size: int, microbatch_size: int = 1, **options: Any
) -> Schedule:
    """Make the schedule of a name or a file, for a batch in microbatches of equal size.

    Args:
        schedule: the name of a builder in any spelling, as of :func:`find_builder`; or the path of a file, as
            of :func:`read_schedule`: a ``Path``, or text with a ``.`` or ``/`` in it.
        ranks: number of ranks of the pipeline.
        batch_size: number of rows that one pipeline takes in a step.
        microbatch_size: number of rows of a microbatch, a divisor of ``batch_size``; or, in a schedule of
            slices, of a sequence.
        options: further arguments of the builder, such as ``chunks=2``; a file takes no options.

    Raises:
        ValueError: sizes that do not divide, an unknown name, or a file for another number of ranks or
            microbatches.
        FileNotFoundError: no file is at the path.

    Warns:
        UserWarning: for fewer microbatches than ranks times stages per rank.

    References:
        torchtitan, ``build_pipeline_schedule``.

    >>> configure("Interleaved1F1B", ranks=2, batch_size=32, microbatch_size=4, chunks=3)
    Schedule('interleaved_1f1b', ranks=2, stages=6, microbatches=8, instructions=96, digest='df061008b722')
    """
    require_type("schedule", schedule, (str, PathLike), "the name of a schedule or the path of its file")
    require_counts(ranks=ranks, batch_size=batch_size, microbatch_size=microbatch_size)
    microbatches, left_over = divmod(batch_size, microbatch_size)
    if left_over:
        raise ValueError(
            f"microbatch_size = {microbatch_size} does not divide batch_size = {batch_size}: use a divisor of"
            f" {batch_size}, or a batch of {batch_size - left_over + microbatch_size}"
        )
    if isinstance(schedule, str) and "." not in schedule and sep not in schedule:
        made = find_builder(schedule)(ranks, microbatches, **options)
    else:
        made = _read(Path(schedule), {"ranks": ranks, "microbatches": microbatches}, options)
    stages = len(made.placement)
    if microbatches < stages:
        warnings.warn(
            f"{microbatches} microbatches are fewer than the {stages} stages of {made.name}, which may result"
            f" in a bubble in the pipeline: {stages} microbatches of {microbatch_size} are a batch of"
            f" {stages * microbatch_size}",
            stacklevel=3,
        )
    return made


def _read(path: Path, sizes: dict[str, int], options: dict[str, Any]) -> Schedule:
    if options:
        raise ValueError(f"a schedule in a file takes no options, got {', '.join(options)}: leave them out")
    if not path.is_file():
        raise FileNotFoundError(f"no schedule is at {path}: give the path of a CSV file, or a name as 1f1b")
    made = read_schedule(path)
    for name, size in sizes.items():
        has = made.sequences if name == "microbatches" else getattr(made, name)
        if has != size:
            raise ValueError(
                f"the schedule in {path} has {has} {name}, the configuration {size}: make both equal"
            )
    return made
