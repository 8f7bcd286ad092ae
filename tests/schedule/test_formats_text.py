"""The table of operations, and one instruction as text: parsing is the strict inverse of ``str``."""

from dataclasses import fields, replace

import pytest
from hypothesis import given, strategies as st

from ppfunc.schedule import Costs, F, ScheduleError, check, gpipe, insert_unshards
from ppfunc.schedule.instruction import (
    COMMUNICATION,
    KINDS,
    WHOLE_STAGE,
    FormatError,
    Instruction,
    Op,
    overlap,
    parse_instruction,
)

NUMBERS = st.integers(0, 10**12)
OPTIONAL = st.none() | NUMBERS


@st.composite
def elementary(draw, ops=tuple(o for o in Op if o is not Op.OVERLAP_F_B)):
    op = draw(st.sampled_from(ops))
    if op in WHOLE_STAGE:
        return Instruction(op, draw(NUMBERS))
    peer = draw(OPTIONAL) if op in COMMUNICATION else None
    return Instruction(op, draw(NUMBERS), draw(NUMBERS), peer, draw(OPTIONAL))


OVERLAPPED = st.builds(overlap, elementary(ops=(Op.F,)), elementary(ops=(Op.B, Op.I)))


@given(elementary() | OVERLAPPED)
def test_parsing_inverts_printing(instruction):
    assert parse_instruction(str(instruction)) == instruction


@given(st.text(alphabet="0123FBIWSEND_RCV>@();OLAP", max_size=24))
def test_what_parses_prints_back_to_the_same_text(text):
    try:
        instruction = parse_instruction(text)
    except FormatError:
        return
    assert str(instruction) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not an instruction"),
        ("0F1junk", "not an instruction"),
        (" 0F1", "not an instruction"),
        ("0F1 ", "not an instruction"),
        ("0F1\n", "not an instruction"),
        ("-1F0", "not an instruction"),
        ("01F0", "not an instruction"),
        ("0F00", "not an instruction"),
        ("0f0", "not an instruction"),
        ("\u0660F\u0660", "not an instruction"),  # digits of another script
        ("0X1", "unknown operation X"),
        ("0OVERLAP_F_B1", "unknown operation OVERLAP_F_B"),
        ("0F", "needs a microbatch"),
        ("0STEP1", "expected no microbatch"),
        ("0F1>2", "only a message has a peer"),
        ("0STEP@1", "expected no slot"),
        ("(0F1)OVERLAP_F_B", "not an overlapped pair"),
        ("(0F1;1B0)", "not an overlapped pair"),
        ("(0F1;1B0)OVERLAP_F_Bx", "not an overlapped pair"),
        ("(1B0;0F1)OVERLAP_F_B", "expected a forward, then a backward"),
        ("(0F1;0F2)OVERLAP_F_B", "expected a forward, then a backward"),
        ("((0F1;1B0)OVERLAP_F_B;1B0)OVERLAP_F_B", "not an overlapped pair"),
        ("9" * 10**6 + "F0", "not an instruction"),
        ("0F" + "9" * 5000, "not an instruction"),
    ],
)
def test_anything_else_is_refused_with_the_reason(text, reason):
    with pytest.raises(FormatError, match=reason) as caught:
        parse_instruction(text)
    assert len(str(caught.value)) < 400


def test_every_operation_has_a_row_that_fits_the_others():
    assert KINDS.keys() == set(Op)
    states = {item for kind in KINDS.values() for item in kind.gives.items()}
    states |= {("residuals", "not computed"), ("residuals", "dropped"), ("parameters", "sharded")}
    states |= {("data", "missing"), ("data", "received")}
    times = {field.name for field in fields(Costs)}
    for op, kind in KINDS.items():
        assert {(thing, state) for thing, found in kind.needs.items() for state in found} <= states, op
        assert kind.unit is None or op in COMMUNICATION or (kind.cost or op.lower()) in times, op
        assert bool(kind.label) == bool(kind.colour) and bool(kind.label) <= bool(kind.unit), op
        assert kind.microbatch or (kind.held == (0, 0) and not kind.inputs), op


def test_a_row_decides_what_is_proved_and_refused(monkeypatch):
    """Without UNSHARD before F a schedule in shards is wrong, because the row of F says so."""
    schedule = insert_unshards(gpipe(1, 1))
    late = replace(schedule, programs=(((F(0, 0), *schedule.programs[0][0][:1]), *schedule.programs[0][1:]),))
    with pytest.raises(ScheduleError, match="parameters of stage 0 are sharded, and F needs them whole"):
        check(late)
    monkeypatch.setitem(KINDS, Op.F, KINDS[Op.F]._replace(needs={}))
    check(late)
