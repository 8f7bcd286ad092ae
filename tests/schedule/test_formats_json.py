"""The JSON form: reading gives back an equal value, and errors name the place."""

import json
import tracemalloc

import pytest

from ppfunc.schedule import from_trace, gpipe
from ppfunc.schedule.formats.files import parse
from ppfunc.schedule.instruction import FormatError, Instruction, Op, overlap
from ppfunc.schedule.json import from_json, to_json
from ppfunc.schedule.schedule import Flow, Schedule

F = Instruction(Op.F, 0, 3)
RICH = Schedule(
    'two "chains"',
    (0, 1, 1, 0),
    (Flow((0, 1), range(2)), Flow((2, 3), range(2, 4))),
    (
        ((), (F, overlap(F, Instruction(Op.B, 2, 1)))),
        ((Instruction(Op.SEND_F, 0, 3, peer=2, slot=1), Instruction(Op.STEP, 1)),),
    ),
    ((0, 2),),
)


def test_everything_that_a_schedule_can_hold_comes_back():
    again = from_json(to_json(RICH))
    assert again == RICH and again.digest == RICH.digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("chains"), r"^\$\.chains: missing"),
        (lambda d: d.update(extra=1), r"^\$: unknown key 'extra'"),
        (lambda d: d.update(version=2), r"^\$\.version: expected 1.*got 2"),
        (lambda d: d.update(version=True), r"^\$\.version: expected 1"),
        (lambda d: d.update(format="other"), r"^\$\.format"),
        (lambda d: d.update(name=3), r"^\$\.name: expected a string, got 3"),
        (lambda d: d.update(placement=[0, "1"]), r"^\$\.placement\[1\]: expected a whole number"),
        (lambda d: d.update(placement=[0, -1]), r"^\$\.placement\[1\]"),
        (lambda d: d.update(placement=[0, True]), r"^\$\.placement\[1\]"),
        (lambda d: d.update(skips=[[0]]), r"^\$\.skips\[0\]: expected a list of two"),
        (lambda d: d["chains"][0].update(microbatches=[0, 1.5]), r"^\$\.chains\[0\]\.microbatches\[1\]"),
        (lambda d: d["chains"].append(7), r"^\$\.chains\[1\]: expected an object"),
        (lambda d: d["programs"][1].__setitem__(2, "1B0"), r"^\$\.programs\[1\]\[2\]: expected a list"),
        (
            lambda d: d["programs"][1][2].append("1B0x"),
            r"^\$\.programs\[1\]\[2\]\[1\]: '1B0x' is not an instruction",
        ),
        (lambda d: d["programs"][1][2].append(None), r"^\$\.programs\[1\]\[2\]\[1\]: expected a string"),
    ],
)
def test_errors_begin_with_the_path(change, message):
    document = json.loads(to_json(gpipe(2, 2)))
    change(document)
    with pytest.raises(FormatError, match=message):
        from_json(json.dumps(document))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "1",
        "null",
        "[" * 100_000,
        '{"a": 1, "a": 2}',
        '{"version": ' + "9" * 100_000 + "}",
        "NaN",
        "\x00",
    ],
)
def test_what_is_no_document_is_refused(text):
    with pytest.raises(FormatError, match=r"^\$"):
        from_json(text)


def test_a_key_twice_is_refused():
    text = to_json(gpipe(2, 2))
    with pytest.raises(FormatError, match="the key 'name' occurs twice"):
        from_json(text.replace('"name": "gpipe"', '"name": "gpipe", "name": "other"'))


def test_a_range_with_gaps_is_written_as_numbers():
    gaps, whole = (Schedule("gaps", (0,), (Flow((0,), range(0, 4, step)),), ((),)) for step in (2, 1))
    assert from_json(to_json(gaps)).flows == (Flow((0,), (0, 2)),)
    assert gaps.digest == from_json(to_json(gaps)).digest != whole.digest


@pytest.mark.parametrize("read", [from_json, from_trace, lambda text: parse(f'{{"a": {text}}}', "file")])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" + "[]," * 3_300_000 + "[]]", "3300002 lists and objects, expected at most 2000000"),
        ("[" + "0.5," * 11_000_000 + "1]", "11000000 commas, expected at most 10000000"),
    ],
)
def test_a_hostile_file_takes_no_memory(read, text, message):
    """10 MB of empty lists took 244 MB before they were refused, and the limit of a file is 256 MB."""
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=message.replace("3300002", "330000[23]")):
            read(text)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(text)
    finally:
        tracemalloc.stop()
