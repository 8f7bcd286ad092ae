"""Write and read the JSON form: all of a schedule, versioned, so that reading gives back an equal value.

The document is one object; steps are lists of instructions in the grammar of
:mod:`ppfunc.schedule.instruction`::

    {"format": "ppfunc.schedule", "version": 1, "name": "gpipe", "placement": [0, 1],
     "chains": [{"stages": [0, 1], "microbatches": [0, 2]}], "skips": [],
     "programs": [[["0F0"], ["0F1"], ["0B0"], ["0B1"]], ...]}

``microbatches`` is the half-open range of the chain; ``placement[s]`` is the rank of stage ``s``. Costs are
an object of the values that differ from the defaults: numbers, lists of numbers, or objects by stage.
"""

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from numbers import Rational
from typing import Any

from ppfunc._checks import require_type

from .errors import require_schedule
from .instruction import FormatError, Instruction, parse_instruction, shortened
from .schedule import Chain, Schedule

FORMAT = "ppfunc.schedule"
VERSION = 1
# Those of a trace of 256 ranks and 1024 microbatches, with some room.
_MOST_CONTAINERS, _MOST_COMMAS = 2_000_000, 10_000_000
_LONGEST = 2**20  # characters of costs
_KEYS = ("format", "version", "name", "placement", "chains", "skips", "programs")


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
        "chains": [{"stages": c.stages, "microbatches": _bounds(c)} for c in schedule.chains],
        "skips": schedule.skips,
    }
    programs = ",\n".join(
        json.dumps([[str(i) for i in step] for step in program], separators=(",", ":"))
        for program in schedule.programs
    )
    return f'{json.dumps(head)[:-1]}, "programs": [\n{programs}\n]}}\n'


def _bounds(chain: Chain) -> list[int]:
    if chain.microbatches.step != 1:
        raise ValueError(
            "the microbatches of a chain are consecutive: expected a range with step 1, got"
            f" {chain.microbatches}"
        )
    return [chain.microbatches.start, chain.microbatches.stop]


def from_json(text: str) -> Schedule:
    """Read the schedule that the JSON ``text`` describes; it is not yet checked.

    Raises:
        FormatError: the text is not such a document; the message begins with the JSON path of the
            place, as in ``$.programs[2][5][0]``.
    """
    require_type("text", text, str, "the content of a file")
    return from_document(load(text))


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


def from_document(document: Any, path: str = "$") -> Schedule:
    """Read the schedule of a document that stands at ``path``; raises as :func:`from_json`."""
    _header(document, path)
    return Schedule(
        _text(f"{path}.name", document["name"]),
        tuple(_number(*rank) for rank in _items(f"{path}.placement", document["placement"])),
        tuple(_chain(*chain) for chain in _items(f"{path}.chains", document["chains"])),
        tuple(
            tuple(tuple(_instruction(*i) for i in _items(*step)) for step in _items(*program))
            for program in _items(f"{path}.programs", document["programs"])
        ),
        tuple(_pair(*skip) for skip in _items(f"{path}.skips", document["skips"])),
    )


def times_of(path: str, value: Any, rows: int) -> list[list[float]]:
    """Read so many lists of finite numbers from 0 on, as they stand at ``path``."""
    times = [[_time(*item) for item in _items(*row)] for row in _items(path, value)]
    _require(len(times) == rows, path, value, f"{rows} lists")
    return times


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise FormatError(f"$: the key {shortened(key)} occurs twice in one object")
        entries[key] = value
    return entries


def _require(fits: bool, path: str, value: Any, expected: str) -> None:
    if not fits:
        raise FormatError(f"{path}: expected {expected}, got {reprlib.repr(value)}")


def _header(document: Any, path: str) -> None:
    """Check format and version before the keys, so that a newer document is called newer, not malformed."""
    _require(isinstance(document, dict), path, document, f"an object with the keys {', '.join(_KEYS)}")
    kind, version = document.get("format"), document.get("version")
    _require(kind == FORMAT, f"{path}.format", kind, repr(FORMAT))
    same = type(version) is int and version == VERSION
    _require(same, f"{path}.version", version, f"{VERSION}, the version that this ppfunc reads and writes")
    _object(path, document, _KEYS)


def _object(path: str, value: Any, keys: tuple[str, ...]) -> None:
    _require(isinstance(value, dict), path, value, f"an object with the keys {', '.join(keys)}")
    for key in keys:
        if key not in value:
            raise FormatError(f"{path}.{key}: missing: expected the keys {', '.join(keys)}")
    for key in value:
        if key not in keys:
            raise FormatError(f"{path}: unknown key {shortened(key)}: expected the keys {', '.join(keys)}")


def _items(path: str, value: Any) -> list[tuple[str, Any]]:
    """List ``(path, item)`` for the items of the list at ``path``."""
    _require(isinstance(value, list), path, value, "a list")
    return [(f"{path}[{n}]", item) for n, item in enumerate(value)]


def _text(path: str, value: Any) -> str:
    _require(isinstance(value, str), path, value, "a string")
    return value


def _number(path: str, value: Any) -> int:
    _require(type(value) is int and value >= 0, path, value, "a whole number from 0")
    return value


def _time(path: str, value: Any) -> float:
    _require(
        type(value) in (int, float) and 0 <= value <= 1e100, path, value, "a time: a finite number from 0"
    )
    return value


def _pair(path: str, value: Any) -> tuple[int, int]:
    numbers = [_number(*item) for item in _items(path, value)]
    _require(len(numbers) == 2, path, value, "a list of two numbers")
    return numbers[0], numbers[1]


def _chain(path: str, value: Any) -> Chain:
    _object(path, value, ("stages", "microbatches"))
    walked = range(*_pair(f"{path}.microbatches", value["microbatches"]))
    return Chain(tuple(_number(*stage) for stage in _items(f"{path}.stages", value["stages"])), walked)


def _instruction(path: str, value: Any) -> Instruction:
    text = _text(path, value)
    try:
        return parse_instruction(text)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None


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
    expected = f"expected an object with some of {', '.join(names)}"
    require_type("text", text, str, "the text of a JSON object")
    if len(text) > _LONGEST:
        raise ValueError(f"got {len(text)} characters, expected at most {_LONGEST}")
    try:
        document = load(text)
    except FormatError as error:
        raise ValueError(f"{str(error).removeprefix('$: ')}; {expected}") from None
    if not isinstance(document, dict):
        raise ValueError(f"got {reprlib.repr(document)}, {expected}")
    unknown = [key for key in document if key not in names]
    if unknown:
        raise ValueError(f"has {reprlib.repr(unknown[0])}, {expected}")
    return {name: _value(name, value) for name, value in document.items()}


def _value(name: str, value: Any) -> Any:
    """Read the value ``name`` of costs from JSON; keep other than numbers, to be refused by name."""
    if isinstance(value, list):
        return tuple(_value(name, number) for number in value)
    if isinstance(value, dict):
        wrong = [key for key in value if not re.fullmatch("0|[1-9][0-9]{0,9}", key)]
        if wrong:
            raise ValueError(f"{name} has the key {reprlib.repr(wrong[0])}, expected the number of a stage")
        return {int(stage): _value(name, number) for stage, number in value.items()}
    if isinstance(value, str) and re.fullmatch("[0-9]{1,99}/[1-9][0-9]{0,99}", value):
        from fractions import Fraction  # here, because most uses of schedules need none and it loads slowly

        return Fraction(value)
    return value
