"""Write and read the JSON form: all of a schedule, versioned, so that reading gives back an equal value.

The document is one object; steps are lists of instructions in the grammar of
:mod:`ppfunc.schedule.instruction`::

    {"format": "ppfunc.schedule", "version": 1, "name": "gpipe", "placement": [0, 1],
     "chains": [{"stages": [0, 1], "microbatches": [0, 2]}], "skips": [],
     "programs": [[["0F0"], ["0F1"], ["0B0"], ["0B1"]], ...]}

``chains`` has the flows: ``microbatches`` is a half-open range, or ``{"numbers": [0, 2]}``; a flow that is
no chain has ``"edges": [[0, 1], ...]`` beside them. ``placement[s]`` is the rank of stage ``s``. A schedule
of slices has ``"slices": k``; ``"replicas": [[0, 3], ...]`` are left out where they are the stages at equal
places of several flows. Costs are an object of the values that differ from the defaults:
numbers, lists of numbers, or objects by stage; ``slices`` is a list of such objects.
"""

import json
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from numbers import Rational
from typing import Any

from ppfunc._checks import naming_arguments, require_type

from .errors import require_schedule
from .instruction import FormatError, Instruction, parse_instruction, shortened
from .schedule import Flow, Schedule, bounds, by_place

FORMAT = "ppfunc.schedule"
VERSION = 1
# Those of a trace of 256 ranks and 1024 microbatches, with some room.
_MOST_CONTAINERS, _MOST_COMMAS = 2_000_000, 10_000_000
_LONGEST = 2**20  # characters of costs


@naming_arguments
def to_json(schedule: Schedule) -> str:
    """Return the JSON text of ``schedule``, one line per rank.

    >>> from ppfunc.schedule import gpipe
    >>> schedule = gpipe(ranks=2, microbatches=2)
    >>> from_json(to_json(schedule)) == schedule
    True
    """
    require_schedule(schedule)
    head = {
        "format": FORMAT,
        "version": VERSION,
        "name": schedule.name,
        "placement": schedule.placement,
        "chains": [
            {"stages": f.stages, "microbatches": bounds(f.microbatches)}
            | ({} if f.edges is None else {"edges": f.edges})
            for f in schedule.flows
        ],
        "skips": schedule.skips,
        **({"slices": schedule.slices} if schedule.slices else {}),
        **({} if schedule.replicas == by_place(schedule.flows) else {"replicas": schedule.replicas}),
    }
    programs = ",\n".join(
        json.dumps([[str(i) for i in step] for step in program], separators=(",", ":"))
        for program in schedule.programs
    )
    return f'{json.dumps(head)[:-1]}, "programs": [\n{programs}\n]}}\n'


@naming_arguments
def from_json(text: str) -> Schedule:
    """Read the schedule that the JSON ``text`` describes; it is not yet checked.

    Raises:
        FormatError: the text is not such a document; the message begins with the JSON path of the
            place, as in ``$.programs[2][5][0]``.
    """
    require_type("text", text, str, "the content of a file")
    return read_schedule_at("$", load(text))


def load(text: str) -> Any:
    """Return the document that JSON ``text`` holds; no object in it has a key twice.

    Memory is bounded before anything is parsed: an empty list takes some 70 bytes, an object 240, a number
    32.
    """
    for kind, signs, most in (("lists and objects", "[{", _MOST_CONTAINERS), ("commas", ",", _MOST_COMMAS)):
        if (count := sum(map(text.count, signs))) > most:
            raise FormatError(f"$: {count} {kind}, expected at most {most}: no schedule has more")
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except FormatError:
        raise
    except RecursionError:
        raise FormatError("$: not JSON: nested too deeply") from None
    except ValueError as error:
        raise FormatError(f"$: not JSON: {str(error)[:200]}; it may be cut short: write it again") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise FormatError(f"$: the key {shortened(key)} occurs twice in one object")
        entries[key] = value
    return entries


def read(path: str, value: Any, form: Any) -> Any:
    """Read the JSON value at ``path``, or raise FormatError for a value of another form.

    Args:
        path: place of the value in its document, such as ``$.programs[2]``.
        value: value of the parsed document there.
        form: a dictionary of the forms by key, for an object; a list of one form, for a list of any length;
            or a function that reads a path and a value.

    Returns:
        Dictionaries for objects, tuples for lists, results of the functions.
    """
    if isinstance(form, dict):
        keys = f"the keys {', '.join(form)}"
        _require(isinstance(value, dict), path, value, f"an object with {keys}")
        if wrong := form.keys() ^ value.keys():
            missing = next((key for key in form if key in wrong), None)
            key = shortened(min(wrong)) if missing is None else missing
            raise FormatError(
                f"{path}: unknown key {key}: expected {keys}"
                if missing is None
                else f"{path}.{key}: missing: expected {keys}"
            )
        return {key: read(f"{path}.{key}", value[key], part) for key, part in form.items()}
    if isinstance(form, list):
        _require(isinstance(value, list), path, value, "a list")
        return tuple(read(f"{path}[{n}]", item, form[0]) for n, item in enumerate(value))
    return form(path, value)


def _require(fits: bool, path: str, value: Any, expected: str) -> None:
    if not fits:
        raise FormatError(f"{path}: expected {expected}, got {reprlib.repr(value)}")


def simple(expected: str, fits: Callable[[Any], bool]) -> Callable[[str, Any], Any]:
    """Make a form for values that stay as they are."""

    def keep(path: str, value: Any) -> Any:
        _require(fits(value), path, value, expected)
        return value

    return keep


TEXT = simple("a string", lambda value: isinstance(value, str))
_NUMBER = simple("a whole number from 0", lambda value: type(value) is int and value >= 0)


def _pair(path: str, value: Any) -> tuple[int, int]:
    numbers = read(path, value, [_NUMBER])
    _require(len(numbers) == 2, path, value, "a list of two numbers")
    return numbers


def _microbatches(path: str, value: Any) -> range | tuple[int, ...]:
    if isinstance(value, dict):
        return read(path, value, {"numbers": [_NUMBER]})["numbers"]
    return range(*_pair(path, value))


def _optional(form: dict[str, Any], **further: Any) -> Callable[[str, Any], Any]:
    """Make the form of an object that may have further keys."""

    def read_some(path: str, value: Any) -> Any:
        given = {key: each for key, each in further.items() if isinstance(value, dict) and key in value}
        return read(path, value, form | given)

    return read_some


def _instruction(path: str, value: Any) -> Instruction:
    text = TEXT(path, value)
    try:
        return parse_instruction(text)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None


_SCHEDULE = {
    "format": simple(repr(FORMAT), lambda value: value == FORMAT),
    "version": simple(
        f"{VERSION}, the version that this ppfunc reads and writes",
        lambda value: type(value) is int and value == VERSION,
    ),
    "name": TEXT,
    "placement": [_NUMBER],
    "chains": [_optional({"stages": [_NUMBER], "microbatches": _microbatches}, edges=[_pair])],
    "skips": [_pair],
    "programs": [[[_instruction]]],
}


def read_schedule_at(path: str, document: Any) -> Schedule:
    """Read the schedule of a document that stands at ``path``; raises as :func:`from_json`."""
    for key in ("format", "version") if isinstance(document, dict) else ():
        # Before other keys, so that a newer document is called newer, not malformed.
        read(f"{path}.{key}", document.get(key), _SCHEDULE[key])
    fields = _optional(_SCHEDULE, slices=_NUMBER, replicas=[[_NUMBER]])(path, document)
    flows = tuple(Flow(f["stages"], f["microbatches"], f.get("edges")) for f in fields["chains"])
    return Schedule(
        fields["name"],
        fields["placement"],
        flows,
        fields["programs"],
        fields["skips"],
        fields.get("slices", 0),
        fields.get("replicas", by_place(flows)),
    )


# -- costs


def plain(value: Any) -> Any:
    """Return a value of costs as JSON has it."""
    if isinstance(value, Mapping):
        return {str(stage): plain(number) for stage, number in value.items()}
    if isinstance(value, Sequence):
        return [plain(number) for number in value]
    if value is None or not isinstance(value, Rational):
        return value if value is None else float(value)
    return int(value.numerator) if value.denominator == 1 else f"{value.numerator}/{value.denominator}"


def read_values(text: str, names: Sequence[str]) -> dict[str, Any]:
    """Read an object with some of these names from JSON; raise ValueError for other text or keys."""
    require_type("text", text, str, "the text of a JSON object")
    if len(text) > _LONGEST:
        raise ValueError(f"got {len(text)} characters, expected at most {_LONGEST}")
    return _values(load(text), names)


def _values(document: Any, names: Sequence[str]) -> dict[str, Any]:
    if not isinstance(document, dict) or not document.keys() <= set(names):
        got = reprlib.repr(document)
        raise ValueError(f"got {got}, expected an object with some of {', '.join(names)}")
    found = {name: _value(name, value) for name, value in document.items() if name != "slices"}
    seconds = found.get("seconds", False)
    _require(isinstance(seconds, bool), "seconds", seconds, "true or false")
    if "slices" in document:
        slices = document["slices"]
        _require(isinstance(slices, list), "slices", slices, "a list of costs")
        found["slices"] = [_values(of_slice, names) for of_slice in slices]
    return found


def _value(name: str, value: Any) -> Any:
    """Read the value ``name`` of costs from JSON; keep other than numbers, to be refused by name."""
    if isinstance(value, list):
        return tuple(_value(name, number) for number in value)
    if isinstance(value, dict):
        for key in value:
            if not re.fullmatch("0|[1-9][0-9]{0,9}", key):
                raise ValueError(f"{name} has the key {reprlib.repr(key)}, expected the number of a stage")
        return {int(stage): _value(name, number) for stage, number in value.items()}
    if isinstance(value, str) and re.fullmatch("[0-9]{1,99}/[1-9][0-9]{0,99}", value):
        from fractions import Fraction  # here, because most uses of schedules need none and it loads slowly

        return Fraction(value)
    return value
