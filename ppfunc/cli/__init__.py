"""Run the command ``ppfunc``: schedules, grids of processes and partitions of layers, without torch.

A subcommand is a function from its options to an exit code and a text. It takes the options that it honours
out of the dictionary; what is left is refused, before anything is printed.

Exit codes: 0 on success; 1 for a wrong schedule; 2 for a bad command line: unknown names, options that
do not fit, files that cannot be read or written.
"""

import os
import sys
from collections.abc import Sequence

from ppfunc import __version__
from ppfunc._checks import limited
from ppfunc.schedule.collector import collector_paused
from ppfunc.schedule.errors import ScheduleError

from .options import CommandParser, Options, option, printable, write
from .parallel import add_parallel
from .schedule import add_schedules
from .search import add_searches

_LONGEST = 4000  # characters of an error, such as a grid with a mark


@collector_paused()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: words after ``ppfunc``; by default the words of the process.

    Returns:
        The exit code.
    """
    description = "Pipeline schedules, grids of processes and partitions of layers."
    parser = CommandParser(
        prog="ppfunc", description=description, example="  ppfunc show 1f1b --ranks 4 --microbatches 8"
    )
    parser.add_argument("--version", action="version", version=f"ppfunc {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (add_schedules, add_searches, add_parallel):
        add(commands)
    values = vars(parser.parse_args(argv)).items()
    return _run({name: value for name, value in values if value is not None and value is not False})


def _run(options: Options) -> int:
    """Call the function of the subcommand, write its text; turn errors into lines and exit codes."""
    command = options.pop("command")
    try:
        out = options.get("out")
        if out and not out.parent.is_dir():
            raise ValueError(f"--out {out}: no directory {out.parent}, make it first")
        code: int
        code, text = options.pop("run")(options)
        out = options.pop("out", None)
        if options:
            raise ValueError(f"{option(next(iter(options)))} changes nothing here: leave it out")
        write(text, out)
        sys.stdout.flush()
        return code
    except ScheduleError as error:
        print(printable(limited(str(error), _LONGEST)), file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader has gone, as in `ppfunc show ... | head`: nothing is left to say or to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        reason = str(error)
        if isinstance(error, OSError) and error.filename:
            reason = f"{error.filename}: {error.strerror}"
        print(printable(limited(f"ppfunc {command}: error: {reason}", _LONGEST)), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
