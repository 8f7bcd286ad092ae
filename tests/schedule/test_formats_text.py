"""One instruction as text: parsing is the strict inverse of ``str``."""

import pytest
from hypothesis import given, strategies as st

from ppfunc.schedule.instruction import (
    COMMUNICATION,
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
