"""The CSV form: strict, plain for torch, with placement and chains found in the content."""

import time
from dataclasses import replace

import pytest
from hypothesis import assume, given, strategies as st

from ppfunc.schedule import BUILDERS, compute_only, gpipe, place_communication
from ppfunc.schedule.errors import ScheduleError
from ppfunc.schedule.formats.csv import from_csv, to_csv
from ppfunc.schedule.formats.files import read_schedule
from ppfunc.schedule.instruction import COMMUNICATION, COMPUTE, FormatError, Instruction, Op
from ppfunc.schedule.json import to_json
from ppfunc.schedule.proof.certificate import check
from ppfunc.schedule.schedule import Flow, Schedule
from ppfunc.testing import schedules
from tests.clock import busy
from tests.schedule.test_certificate_reference import flat, with_steps


@pytest.mark.parametrize("name", [name for name in BUILDERS if name != "data_parallel"])
def test_compute_of_one_instruction_a_step_comes_back_equal(name):
    """Instructions, placement and chains of any schedule do: see ``test_universal.py``."""
    plain = compute_only(BUILDERS[name](4, 8))
    assert from_csv(to_csv(plain), plain.name) == replace(plain, skips=())  # which messages tell
    assert ",," not in to_csv(place_communication(plain))


@given(schedules())
def test_what_is_right_is_right_after_a_journey(schedule):
    again = from_csv(to_csv(schedule))
    assert check(again).peak_activations == check(schedule).peak_activations


# A forward-only file from which the last microbatch is gone is right, with one microbatch less; and a file
# without any backward is one for inference.
@given(schedules([name for name in BUILDERS if "inference" not in name]), st.data())
def test_what_is_wrong_is_wrong_after_a_journey(schedule, data):
    """A compute instruction or a message is missing, there twice, or of a microbatch out of range."""
    assume(not schedule.forward_only)
    places = [p for p in flat(schedule) if at(schedule, *p).op in COMPUTE | COMMUNICATION]
    rank, step, place = data.draw(st.sampled_from(places))
    right = at(schedule, rank, step, place)
    outside = right._replace(microbatch=schedule.microbatches)
    new = data.draw(st.sampled_from([(), (right, right), *([] if right.parts else [(outside,)])]))
    wrong = with_steps(schedule, rank, lambda p: p[step].__setitem__(slice(place, place + 1), new))
    assume(not wrong.forward_only)
    with pytest.raises(ScheduleError):
        check(wrong)
    with pytest.raises(ScheduleError) as caught:
        check(from_csv(to_csv(wrong)))
    assert caught.value.rank is not None and caught.value.position is not None


def at(schedule, rank, step, place):
    return schedule.programs[rank][step][place]


def test_blanks_are_idle_steps():
    schedule = from_csv("0F0,,0B0\n,1F0,1B0,\n")
    assert schedule.programs == tuple(
        tuple((Instruction(Op[text[1]], int(text[0]), 0),) if text else () for text in row)
        for row in (("0F0", "", "0B0"), ("", "1F0", "1B0", ""))
    )
    assert to_csv(schedule) == "0F0,,0B0\n,1F0,1B0,\n"


def test_skip_connections_are_the_edges_of_messages_with_a_peer():
    for message in ("0SEND_F0>2", "2RECV_F0>0", "2SEND_B0>0", "0RECV_B0>2"):
        assert from_csv(f"0F0,{message}\n1F0\n2F0\n").skips == ((0, 2),)


def test_files(tmp_path):
    schedule = gpipe(2, 2)
    (tmp_path / "gpipe.csv").write_text(to_csv(schedule))
    (tmp_path / "gpipe.json").write_text(to_json(schedule))
    assert (
        read_schedule(tmp_path / "gpipe.csv")
        == read_schedule(tmp_path / "gpipe.csv")
        == read_schedule(tmp_path / "gpipe.json")
        == schedule
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("0F0,0B0\n1F0,1B0x\n", r"row 2 \(rank 1\), column 2: '1B0x'"),
        ("0F0,0B0\n1F0, 1B0\n", r"row 2 \(rank 1\), column 2: ' 1B0'"),
        ("0F0, \n", r"row 1 \(rank 0\), column 2: ' '"),
        ("\ufeff0F0,0B0\n", r"row 1 \(rank 0\), column 1"),
        ("0F0;0B0\n", r"row 1 \(rank 0\), column 1"),
        ("0F0\x00,0B0\n", r"row 1 \(rank 0\), column 1"),
        ('0F0,"0B0\n', r"row 1 \(rank 0\): not CSV"),
        ('0F0,"0B0"x\n', r"row 1 \(rank 0\): not CSV"),
        (
            "0F0,0SEND_F0,,0B0\n1RECV_F0,1F0,1B0\n",
            (
                r"row 1 \(rank 0\), column 3: a blank, but only files of nothing but compute may have blanks:"
                r" this has RECV_F"
            ),
        ),
        ("0F0,0B0\n" + "1" * 10**6 + "F0\n", "row 2"),
        ("0F0,0B0\n1F0," + "x" * 100_000 + "\n", r"row 2 \(rank 1\), column 2"),
    ],
)
def test_garbled_text_is_refused_with_its_place(text, message):
    with pytest.raises(FormatError, match=message) as caught:
        from_csv(text)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "rank", "instruction"),
    [
        ("0F0,0B0\n1000000000000F0,1B0\n", 1, "1000000000000F0"),
        ("0F0,0F1000000000000000000,0B0\n", 0, "0F1000000000000000000"),
        ("0F0,0B0\n2F0,2B0\n", 1, "2F0"),
        ("0F0,0B0\n\n", 1, None),
        ("\n", 0, None),
        (",".join(f"0F{n}" for n in range(3000)) + ",1999F0\n", 0, "1999F0"),
        (",".join(["0F0"] * 10**6) + "\n", 0, "0F0"),
        ("\n" * 10**6, 0, None),
        ("\n".join(f"{s}F0,{s}B0" for s in range(2000)) + ",0F3999\n", 1999, "0F3999"),
    ],
)
def test_impossible_numbers_are_refused_before_anything_of_their_size_is_made(text, rank, instruction):
    start = time.process_time()
    with pytest.raises(ScheduleError) as caught:
        check(from_csv(text))
    assert time.process_time() - start < busy()
    assert caught.value.rank == rank
    assert (caught.value.instruction and str(caught.value.instruction)) == instruction


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("1f1b", "1F2", "1F9"),
        ("1f1b", "1B2", "1B9"),
        ("zb_h1", "1W2", "1W9"),
        ("dualpipe", "7F6;", "7F9;"),
        ("dualpipe", "7F6;", "7F99999;"),
    ],
)
def test_a_microbatch_out_of_range_is_named_and_not_those_it_seems_to_add(name, old, new):
    text = to_csv(BUILDERS[name](4, 8))
    with pytest.raises(ScheduleError) as caught:
        check(from_csv(text.replace(old, new, 1)))
    assert new in str(caught.value.instruction)
    assert "out of range" in caught.value.reason or "expected an overlapped pair" in caught.value.reason


def test_two_chains_are_found_although_a_forward_is_missing():
    schedule = BUILDERS["dualpipe"](4, 8)
    text = to_csv(schedule).replace("4F4", "", 1)
    assert from_csv(text).flows == (Flow((0, 1, 2, 3), range(4)), Flow((4, 5, 6, 7), range(4, 8)))


def test_a_misplaced_instruction_does_not_move_its_stage():
    schedule = from_csv("0F0,0F1,0B0,0B1,1B1\n1F0,1F1,1B0\n")
    assert schedule.placement == (0, 1)


def test_binary_and_huge_files_are_refused(tmp_path):
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 100)
    with pytest.raises(FormatError, match="not text"):
        read_schedule(tmp_path / "binary")
    with pytest.raises(OSError):
        read_schedule(tmp_path)


def test_what_torch_has_no_token_for_has_the_same_grammar():
    program = tuple(
        (Instruction(op, 0, None if op in (Op.REDUCE_TIED, Op.STEP) else 0),)
        for op in (Op.LOAD, Op.F, Op.OFFLOAD, Op.FETCH, Op.B, Op.REDUCE_TIED, Op.STEP)
    )
    schedule = Schedule("all", (0,), (Flow((0,), range(1)),), (program,))
    assert to_csv(schedule) == "0LOAD0,0F0,0OFFLOAD0,0FETCH0,0B0,0REDUCE_TIED,0STEP\n"
    assert from_csv(to_csv(schedule), "all") == schedule
