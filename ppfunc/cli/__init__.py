"""Run the command ``ppfunc``: schedules, grids of processes and partitions of layers, without torch.

Exit codes: 0 on success; 1 for a wrong schedule; 2 for a bad command line: unknown names, options that
do not fit, files that cannot be read or written.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from ppfunc import __version__
from ppfunc.schedule.collector import collector_paused
from ppfunc.schedule.errors import ScheduleError

from .compare import add_compare
from .console import CommandParser, printable
from .parallel import add_parallel
from .schedule import add_schedules
from .search import add_plan, add_tune


@collector_paused()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: the words after ``ppfunc``; those of the process by default.

    Returns:
        The exit code.
    """
    description = "Pipeline schedules, grids of processes and partitions of layers."
    parser = CommandParser(
        prog="ppfunc", description=description, example="  ppfunc show 1f1b --ranks 4 --microbatches 8"
    )
    parser.add_argument("--version", action="version", version=f"ppfunc {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (add_schedules, add_compare, add_plan, add_tune, add_parallel):
        add(commands)
    return _run(parser.parse_args(argv))


def _run(arguments: argparse.Namespace) -> int:
    """Call the function of the subcommand; print its errors and turn them into exit codes."""
    try:
        code: int = arguments.func(arguments)
        sys.stdout.flush()
        return code
    except ScheduleError as error:
        print(printable(str(error)), file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader has gone, as in `ppfunc show ... | head`: nothing is left to say or to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        reason = str(error)
        if isinstance(error, OSError) and error.filename:
            reason = f"{error.filename}: {error.strerror}"
        print(printable(f"ppfunc {arguments.command}: error: {reason}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
