"""Declare and read the options of subcommands: a schedule, built or read, and costs of its stages; write
what they print.
"""

import argparse
import inspect
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from ppfunc._checks import limited, suggestion
from ppfunc.schedule import Costs, FormatError, Schedule, Timeline, check, find_builder
from ppfunc.schedule.formats.files import parse, read_text, text_of
from ppfunc.schedule.instruction import RESIDUAL_OPS, TAIL, Op
from ppfunc.schedule.json import load
from ppfunc.schedule.planner.overview import fitted

Options = dict[str, Any]
"""The options on a command line by name, as ``max_activations``."""
_FORWARDS = 500_000  # of a schedule that is built in seconds


class CommandParser(argparse.ArgumentParser):
    """Parse a command line; errors are one line, without control characters.

    Args:
        example: command lines for the end of the help.
        options: options of ``argparse``.
    """

    def __init__(self, *, example: str = "", **options: Any) -> None:
        epilog = f"example:\n{example}" if example else None
        super().__init__(epilog=epilog, formatter_class=_Formatter, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(
            2, f"{printable(f'{self.prog}: error: {limited(message, 400)}')} (see {self.prog} --help)\n"
        )


class _Formatter(argparse.HelpFormatter):
    """Keeps the lines of examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def printable(text: str) -> str:
    r"""Return ``text`` for a terminal: every control character other than newlines is escaped.

    >>> printable("a\x1b[31m\nb")
    'a\\x1b[31m\nb'
    """
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def write(text: str, path: Path | None) -> None:
    """Write ``text`` to the file ``path``, or to standard output with its control characters escaped."""
    if path is None:
        sys.stdout.write(printable(text))
    else:
        path.write_text(text, encoding="utf-8", newline="")


def option(name: str) -> str:
    """Spell the option of a name.

    >>> option("max_activations")
    '--max-activations'
    """
    return f"--{name.replace('_', '-')}"


def _reading(expected: str) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    """Decorate a reader of text to be a type of ``argparse``, whose errors name the expected form."""

    def decorated(read: Callable[[str], Any]) -> Callable[[str], Any]:
        def kind(text: str) -> Any:
            try:
                return read(text)
            except ValueError:
                raise argparse.ArgumentTypeError(f"expected {expected}, got {limited(text, 20)!r}") from None

        return kind

    return decorated


@_reading("a whole number up to a million")
def _count(text: str) -> int:
    value = int(text)
    if abs(value) > 1_000_000:
        raise ValueError
    return value


def _plain_number(text: str) -> float:
    """Read a number; whole numbers stay whole, so that sums of them are exact."""
    value = float(text) if not text.strip().lstrip("+-").isdigit() else int(text)
    if not abs(value) <= 1e100:
        raise ValueError
    return value


_number = _reading("a number up to 1e100")(_plain_number)


@_reading("a number up to 1e100, or several apart by commas")
def _numbers(text: str) -> Any:
    values = tuple(map(_plain_number, text.split(",")))
    return values if len(values) > 1 else values[0]


@_reading("a whole number or a range such as 1..4")
def chunk_range(text: str) -> Any:
    """Read a number of chunks, or a range of them."""
    first, dots, last = text.partition("..")
    return range(int(first), int(last) + 1) if dots else int(first)


COSTS = {
    "forward": "time of a forward; default 1",
    "backward": "time of a whole backward, in place of its parts, each of which takes half",
    "backward_input": "time of an input gradient; default 1",
    "backward_weight": "time of a weight gradient; default 1",
    "overlapped": "time of an overlapped pair; default: the sum of its parts",
    "communication": "latency of a message; default 0",
    "bytes": "size of a message; default 0",
    "bandwidth": "bytes of a message per unit of time; default: no limit",
    "activation": "memory that a forward keeps for its backward; default 1",
    "weight_share": (
        "share of it that is held from the input to the weight gradient; default 0 (zero_bubble, zbv_greedy"
        " without costs: 1)"
    ),
    "recompute": "time of a forward that runs again; default: as the first; a plan recomputes where given",
    "checkpoint": "memory that a forward keeps to run again; default 0",
    "offload": "time to copy an activation to the host; default 0; a plan offloads where given",
    "fetch": "time to copy it back; default: that of --offload",
    "parameters": "memory that a stage takes all the time; default 0",
    "unshard": "time of a gather of parameters, beside compute; default 0",
    "reduce_tied": "time of a sum over tied places, beside compute; default 0",
    "reduce_grad": "time of a sum over data ranks, beside compute; default 0",
    "step": "time of an optimizer step; default 0",
}
_POSITIONAL = ("name", "names", "source")
_KINDS: dict[str, dict[str, Any]] = {
    **{key: {"type": _numbers, "metavar": "X[,X...]"} for key in COSTS},
    "weights": {"type": _numbers, "metavar": "X,X..."},
    **{key: {"type": _number, "metavar": "X"} for key in ("input_weight", "output_weight")},
    "ranks": {"type": _count, "metavar": "P"},
    "microbatches": {"type": _count, "metavar": "M"},
    "slices": {"type": _count, "metavar": "K"},
    "chunks": {"type": _count, "metavar": "V"},
    "cap": {"type": _number, "metavar": "K"},
    **{key: {"type": _number, "metavar": "N"} for key in ("effort", "memory")},
    "order": {"metavar": "source|head"},
    **{key: {"type": Path, "metavar": "FILE"} for key in ("out", "costs")},
    **{key: {"action": "store_true"} for key in ("json", "lowered", "allow_empty")},
    **{key: {} for key in ("format", "for", "per", "placement", "objective", "axes", *_POSITIONAL)},
}


def add_options(
    parser: argparse.ArgumentParser, options: Mapping[str, str | Mapping[str, Any]], unit: str
) -> None:
    """Add the options of a subcommand.

    Args:
        options: the meaning of each option for the help, or arguments of ``add_argument``; by name.
        unit: thing that a cost without commas is for; the help of the costs says it.
    """
    costs = (
        parser.add_argument_group("costs", f"one number for {unit}, or one per stage, as in 1,2,1,1")
        if unit
        else parser
    )
    for name, given in options.items():
        kind = _KINDS.get(name, {"type": _count, "metavar": "N"})
        place = costs if name in ("per", "costs", *COSTS) else parser
        place.add_argument(
            name if name in _POSITIONAL else option(name),
            **kind | ({"help": given} if isinstance(given, str) else dict(given)),
        )


def cost_options(per: str | None = "stage") -> dict[str, Any]:
    """Return an option per argument of ``Costs``, ``--costs`` for a file, and ``--per``.

    Args:
        per: default of ``--per``, for the help; None for a command that has one unit.
    """
    meaning = "what one number is for: a stage, or a rank's share of the model, as in compare"
    units = {"per": {"choices": ("stage", "rank"), "help": f"{meaning}; default: {per}"}}
    file = {"costs": "JSON as Costs.to_json writes it, such as of pp.measure, or as plan --json does"}
    return (units if per else {}) | file | COSTS


SOURCE = {
    "name": {
        "metavar": "NAME|FILE",
        "help": (
            "a name of `ppfunc list`, a file (CSV, also of torch.distributed.pipelining, JSON or trace), or -"
            " for standard input"
        ),
    },
    "ranks": "number of ranks",
    "microbatches": "number of microbatches",
    "sequences": "number of sequences (seq1f1b, seq_zb, decode)",
    "slices": "slices of a sequence (seq1f1b, seq_zb, decode)",
    "chunks": "stages per rank, where that is a choice",
    "group": "microbatches of a group (interleaved_1f1b)",
    "cap": "memory of a rank in activations (zero_bubble, zbv_greedy)",
    "order": "order of messages (deepspeed_train)",
}
"""The name or file of a schedule, and the options with which it is built."""
JSON = {"json": "print one JSON object"}


def is_file(name: str) -> bool:
    """Tell whether a word of the command line is the path of a file and not the name of a schedule."""
    if name == "-" or os.sep in name:
        return True
    try:
        find_builder(name)
    except ValueError:
        return Path(name).exists() or Path(name).suffix.lower() in (".csv", ".json", ".trace")
    return False


def text_of_path(path: str | Path) -> str:
    """Read a text file, or standard input if the path is ``-``, up to a size limit."""
    return text_of(sys.stdin.buffer, "standard input") if str(path) == "-" else read_text(path)


def read_file(path: str) -> tuple[Schedule, Timeline | None]:
    """Read a schedule, and its times from a trace; errors name the file."""
    if path != "-" and not Path(path).exists():
        folder = Path(path).parent
        near = suggestion(path, map(str, folder.iterdir())) if folder.is_dir() else ""
        raise ValueError(f"no such file: {path}{near}")
    try:
        return parse(text_of_path(path), "stdin" if path == "-" else Path(path).stem)
    except FormatError as error:
        name = "standard input" if path == "-" else path
        raise FormatError(str(error) if str(error).startswith(name) else f"{name}: {error}") from None


def require_size(ranks: int, microbatches: int, chunks: int) -> None:
    """Refuse a schedule that would take minutes to build.

    Raises:
        ValueError: more than half a million forwards.
    """
    forwards = ranks * microbatches * chunks
    if min(ranks, microbatches, chunks) > 0 and forwards > _FORWARDS:
        numbers = f"{ranks} x {microbatches} x {chunks}"
        raise ValueError(
            f"ranks x microbatches x stages per rank = {numbers}: expected at most {_FORWARDS} forwards"
        )


def find_source(
    options: Options, proved: bool = True
) -> tuple[Callable[[Costs | None], Schedule], Timeline | None, bool]:
    """Take the name of a schedule out of the options, with the options of its builder; read a file.

    Args:
        proved: whether the schedule of a file is checked.

    Returns:
        A function of costs that makes the schedule; the measured times of a trace, else None; and whether
        the schedule is built for costs.

    Raises:
        ValueError: an unknown name, a missing number, or no such file.
        OSError: a file that cannot be read.
        ScheduleError: a file that is no schedule.
    """
    name = options.pop("name")
    if is_file(name):
        schedule, timeline = read_file(name)
        for number in ("ranks", "microbatches"):
            if options.pop(number, has := getattr(schedule, number)) != has:
                raise ValueError(f"{option(number)}: {name} has {has}; leave the option out")
        if proved:
            check(schedule)
        return lambda costs: schedule, timeline, False
    try:
        build = find_builder(name)
    except ValueError as error:
        raise ValueError(f"{error}; and there is no file of this name") from None
    taken = inspect.signature(build).parameters
    counted = "sequences" if "sequences" in taken else "microbatches"
    if missing := [option(n) for n in ("ranks", counted) if n not in options]:
        raise ValueError(f"{name} needs {' and '.join(missing)}")
    chosen = {n: options.pop(n) for n in taken if n in options and n != "costs"}
    chunks = chosen.get("chunks", 2) if "chunks" in taken else 1
    slices = chosen.get("slices", 2) if "slices" in taken else 1
    require_size(chosen["ranks"], chosen[counted] * slices, chunks)
    takes_costs = "costs" in taken
    return lambda costs: build(**chosen, **{"costs": costs} if takes_costs else {}), None, takes_costs


_HALVES = ("backward_input", "backward_weight")
# The instructions that a cost is for: it changes nothing in a schedule without them.
_OF = {
    "overlapped": {Op.OVERLAP_F_B},
    "weight_share": {Op.W},
    "checkpoint": {Op.RECOMPUTE},
    **{name: {Op.B, Op.I, Op.W, Op.OVERLAP_F_B} for name in ("backward", *_HALVES)},
    **{op.lower(): {op} for op in (Op.UNSHARD, *TAIL, *RESIDUAL_OPS)},
}


def read_costs(options: Options) -> Costs | None:
    """Take the costs out of the options.

    Returns:
        The costs; None if no option gives a cost.

    Raises:
        ValueError: the costs are in two places, or invalid.
        OSError: the file cannot be read.
    """
    costs = {name: options.pop(name) for name in COSTS if name in options}
    if ("bytes" in costs) != ("bandwidth" in costs):
        raise ValueError("--bytes and --bandwidth go together: a message takes latency + bytes / bandwidth")
    if (whole := costs.pop("backward", None)) is not None:
        if both := costs.keys() & {*_HALVES}:
            raise ValueError(f"--backward and {option(min(both))}: give the whole backward, or both parts")
        half = tuple(time / 2 for time in whole) if isinstance(whole, tuple) else whole / 2
        costs |= dict.fromkeys(_HALVES, half)
    if (path := options.pop("costs", None)) is None:
        return Costs(**costs) if costs else None
    if costs:
        raise ValueError(f"--costs {path} and {option(next(iter(costs)))}: give the costs in one place")
    try:
        text = text_of_path(path)
        read = load(text)
        planned = isinstance(read, dict) and isinstance(read.get("costs"), dict)  # as plan --json prints
        return Costs.from_json(json.dumps(read["costs"]) if planned else text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def require_effect(
    given: Collection[str], schedules: Collection[Schedule], unseen: Collection[str] = ()
) -> None:
    """Refuse costs of the command line that change nothing.

    Args:
        given: names of the options on the command line.
        schedules: schedules that the costs are for. The name of a planned schedule, which recomputes and
            offloads only where that is shorter, begins with ``plan``: it takes the costs of both.
        unseen: costs that the output does not show.

    Raises:
        ValueError: a cost of an instruction that is in none of the schedules, or one that is not seen.
    """
    ops = {op for schedule in schedules for op in schedule.ops}
    ops |= RESIDUAL_OPS if any(schedule.name.startswith("plan") for schedule in schedules) else set()
    for name in COSTS:
        users = _OF.get(name)
        if name in given and (name in unseen or (users and not users & ops)):
            absent = "" if name in unseen else f", where is no {' or '.join(sorted(users or ()))}"
            raise ValueError(f"{option(name)} changes nothing here{absent}: leave it out")


def costed_schedule(
    options: Options,
    *,
    timed: bool = True,
    proved: bool = True,
    default: bool = False,
    unseen: Collection[str] = (),
) -> tuple[Schedule, Timeline | None, Costs | None]:
    """Return the schedule that is named, its measured times, and the costs of its stages that are given.

    Args:
        timed: whether the caller uses costs; a builder that takes them does in any case.
        proved: whether a file is checked.
        default: without any, the times of a schedule that is not measured are the times of ``Costs()``.
        unseen: costs that the output does not show, unless the schedule is built for them.
    """
    given, (make, timeline, takes_costs) = {*options}, find_source(options, proved)
    costs = read_costs(options) if timed or takes_costs else None
    known = costs is not None or (default and timeline is None)
    per_rank = known and options.pop("per", "stage") == "rank"
    schedule = make(None if per_rank else costs)
    if per_rank:
        costs = (costs or Costs()).per_rank(schedule)
        schedule = make(costs)
    require_effect(given, [schedule], () if takes_costs else unseen)
    return schedule, timeline, None if costs is None else fitted(costs, schedule)


def form_of(options: Options, suffixes: Mapping[str, tuple[str, ...]], default: str | None = None) -> str:
    """Take ``--format`` out of the options; by default, the suffix of ``--out`` says the format.

    Args:
        suffixes: suffixes of every format, the usual format first.
        default: format where neither says one.

    Raises:
        ValueError: the suffix belongs to another format, or to none.

    >>> form_of({"out": Path("x.svg")}, {"grid": (".txt",), "svg": (".svg",)})
    'svg'
    """
    chosen, out = options.pop("format", default), options.get("out")
    suffix = out.suffix.lower() if out else ""
    forms = [form for form, own in suffixes.items() if suffix in own]
    if suffix and not (forms if chosen is None else not forms or chosen in forms):
        wanted = suffixes[chosen] if chosen else dict.fromkeys(s for own in suffixes.values() for s in own)
        raise ValueError(f"--out {out}: expected a name that ends in {' or '.join(wanted)}")
    return chosen or [*forms, *suffixes][0]
