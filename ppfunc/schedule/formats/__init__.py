"""Write and read schedules as text and pictures: CSV, JSON, grid, instruction streams, SVG, Chrome trace.

Notebooks show schedules and timelines. IPython asks the class of a value for its picture, which modules above
that class draw: so they are given to the class here, and ``ppfunc.schedule`` imports this package.
"""

from typing import TYPE_CHECKING, Any

from ppfunc._checks import clipped

from ..errors import ScheduleError
from ..instruction import COMPUTE
from ..schedule import Schedule

if TYPE_CHECKING:
    from ..proof.timeline import Timeline

_COLUMN = 960.0  # pixels that a notebook has for a picture
_MOST = 1000  # compute instructions that are shown as a picture, of some 200 bytes each
_SHOWN = 20_000  # instructions whose grid is made only to show its beginning


def show_grid(schedule: Schedule, printer: Any, cycle: bool) -> None:
    """Show a schedule to IPython in short form, with its grid at top level (``_repr_pretty_``)."""
    from .grid import to_grid  # here, because it is needed in notebooks only

    printer.text(repr(schedule))
    if len(printer.stack) == 1 and sum(schedule.counts.values()) <= _SHOWN:
        printer.text("\n" + clipped(to_grid(schedule)))


def picture(schedule: "Schedule | Timeline") -> str | None:
    """Draw the picture of a schedule, or of a timeline, for a notebook (``_repr_svg_``).

    Returns:
        None for a picture that would be too large, or a schedule that cannot run: the notebook then shows the
        text alone.
    """
    from .svg import to_svg  # likewise

    counts = (schedule if isinstance(schedule, Schedule) else schedule.schedule).counts
    if sum(count for op, count in counts.items() if op in COMPUTE) > _MOST:
        return None
    try:
        return to_svg(schedule, width=_COLUMN)
    except ScheduleError:  # saying what is wrong with it is the work of check
        return None


Schedule._repr_pretty_, Schedule._repr_svg_ = show_grid, picture
