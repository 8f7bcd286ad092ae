"""Run the command ``ppfunc``: schedules, grids of processes and partitions of layers, without torch.

A subcommand takes the options that it honours; what is left of them is refused, before anything is printed.

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

from .commands import COMMANDS
from .options import CommandParser, Options, add_options, option, printable, write

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
    for name, command in COMMANDS.items():
        described = commands.add_parser(
            name, help=command.help, description=command.description, example=command.example
        )
        add_options(described, command.options, command.unit)
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
        code, text = COMMANDS[command].run(options)
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
