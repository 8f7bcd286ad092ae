"""Run ``ppfunc tune``: rank configurations for a model of the user's own file."""

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any

from ppfunc._checks import suggestion

from .number import count, number
from .output import form_of, require_folder, write


def add_tune(commands: Any) -> None:
    """Add ``tune`` to the subparsers of a command line."""
    tuning = commands.add_parser(
        "tune",
        help="rank grids, cuts, schedules, rematerialisation and shards for a model, with torch",
        description=(
            "FUNCTION of the file FILE, which is run, returns a dictionary of arguments of ppfunc.tune, such"
            " as grids, and tensor=, which lays the model over tensor ranks; the options here come before"
            " those. Ctrl-C ends the search with the best so far."
        ),
        example="  ppfunc tune train.py:arguments --ranks 8 --memory 80e9 --out frontier.svg",
    )
    tuning.add_argument("source", metavar="FILE:FUNCTION", help="where the arguments come from")
    for name, kind, meaning in (
        ("ranks", count, "of all pipelines together"), ("batch", count, "rows of a step"),
        ("memory", number, "bytes of a rank"), ("top", count, "rows that fit; default: 5"),
        ("effort", number, "of plans; default: 0.1"),
    ):  # fmt: skip
        tuning.add_argument(f"--{name}", type=kind, metavar="N", help=meaning)
    tuning.add_argument("--json", action="store_true", help="print one JSON object")
    tuning.add_argument("--out", metavar="FILE", type=Path, help="draw seconds over bytes there, as an svg")
    tuning.set_defaults(func=_tune)


def _tune(arguments: argparse.Namespace) -> int:
    form_of(arguments.out, None, {"svg": (".svg",)})
    require_folder(arguments.out)
    from ppfunc.tuning.tune import tune  # here, because it loads torch

    file, _, name = arguments.source.rpartition(":")
    if not file:
        raise ValueError(f"FILE:FUNCTION is {arguments.source!r}, expected such as train.py:arguments")
    sys.path.insert(0, str(Path(file).resolve().parent))  # as Python does for a file that it runs
    if not callable(function := (names := runpy.run_path(file)).get(name)):
        raise ValueError(f"{file} has no function {name!r}{suggestion(name, names)}")
    options = ("ranks", "batch", "memory", "top", "effort")
    chosen = {k: v for k in options if (v := getattr(arguments, k)) is not None}
    say = {"progress": lambda *step: print(*step, file=sys.stderr)} if sys.stderr.isatty() else {}
    of_file = function()
    if not isinstance(of_file, dict):
        raise ValueError(
            f"{arguments.source} returned {of_file!r}, expected the arguments of ppfunc.tune by name"
        )
    try:
        tuning = tune(**of_file | say | chosen)
    except TypeError as error:
        raise ValueError(f"{arguments.source}: {error}") from None
    if arguments.out:
        write(tuning.to_svg(), arguments.out)
    write(f"{tuning.to_json() if arguments.json else tuning}\n")
    return 0 if tuning.rows and tuning.rows[0].fits else 1
