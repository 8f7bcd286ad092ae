"""torch's own CSV files are read, and ours load in torch."""

from __future__ import annotations

import csv
import importlib.metadata
from dataclasses import replace
from itertools import pairwise

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from hypothesis import given

from ppfunc.schedule import (
    BUILDERS,
    FormatError,
    allocate_slots,
    append_tail,
    compute_only,
    from_csv,
    insert_offloads,
    interleaved_1f1b,
    place_communication,
    read_schedule,
    remove_tail,
    remove_unshards,
    to_csv,
    to_torch_csv,
)
from ppfunc.schedule.instruction import COMMUNICATION, COMPUTE, SENDS, Op, parse_instruction, parts_of
from ppfunc.schedule.passes.running import send_completion
from ppfunc.schedule.proof.certificate import check
from ppfunc.testing import schedules
from tests.schedule.reference import Model
from tests.schedule.test_torch_parity import Stage

RANKS, MICROBATCHES = 3, 6
WAITS = hasattr(torch_schedules, "WAIT_SEND_F")  # from torch 2.15 on
KINDS = {
    "ScheduleInterleaved1F1B": "interleaved_1f1b",
    "ScheduleLoopedBFS": "looped_bfs",
    "ScheduleInterleavedZeroBubble": "interleaved_zb",
    "ScheduleZBVZeroBubble": "zbv",
    "ScheduleDualPipeV": "dualpipev",
}


def torch_schedule(kind: str):
    held = (0, 2 * RANKS - 1) if kind in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV") else (0, RANKS)
    stages = [Stage(s, RANKS, 2 * RANKS) for s in held]
    return getattr(torch_schedules, kind)(stages, MICROBATCHES, loss_fn=lambda output, target: None)


@pytest.mark.parametrize("kind", KINDS)
def test_what_torch_writes_is_read(kind, tmp_path):
    theirs = torch_schedule(kind)
    theirs._dump_csv(tmp_path / "compute.csv", format="compute_only")
    theirs._dump_csv(tmp_path / "comms.csv", format="compute_comms")
    ours = BUILDERS[KINDS[kind]](RANKS, MICROBATCHES)
    for form in ("compute", "comms"):
        read = read_schedule(tmp_path / f"{form}.csv")
        assert (read.name, read.placement, read.flows) == (form, ours.placement, ours.flows)
        for rank, actions in theirs.pipeline_order.items():
            expected = [str(action) for action in actions if action is not None]
            assert [str(i) for i in read.instructions(rank) if i.op in COMPUTE] == expected
        assert read.has_messages == (form == "comms")
        assert check(read).microbatches == MICROBATCHES
        for rank, row in enumerate(cells(tmp_path / f"{form}.csv")):
            theirs_at, ours_at = waits_of(row), completed(read, rank)
            assert theirs_at.keys() == (ours_at.keys() if WAITS else set())
            assert all(at >= ours_at[send] for send, at in theirs_at.items())


def cells(file):
    """The rows of a file, without blanks."""
    return [[cell for cell in row if cell] for row in csv.reader(file.read_text().splitlines())]


def waits_of(row):
    """By send: after how many other cells of its row its wait stands."""
    found, others = {}, 0
    for cell in row:
        if "WAIT_SEND" in cell:
            assert found.setdefault(cell.replace("WAIT_", ""), others) == others
        others += "WAIT_" not in cell
    return found


def completed(schedule, rank):
    """By send: after how many instructions of its rank ``send_completion`` waits for it."""
    return {
        str(send): sum(map(len, schedule.programs[rank][: step + 1]))
        for step, sends in send_completion(schedule, rank).items()
        for send in sends
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lowered", [False, True])
def test_what_we_write_loads_in_torch(kind, lowered, tmp_path):
    ours = BUILDERS[KINDS[kind]](RANKS, MICROBATCHES)
    ours = place_communication(ours) if lowered else ours
    (tmp_path / "ours.csv").write_text(to_csv(ours, waits=lowered and WAITS))
    theirs = torch_schedule(kind)
    theirs._load_csv(tmp_path / "ours.csv", format="compute_comms" if lowered else "compute_only")
    loaded = theirs.pipeline_order_with_comms if lowered else theirs.pipeline_order
    assert [[str(action) for action in loaded[r]] for r in range(RANKS)] == cells(tmp_path / "ours.csv")
    assert [[c for c in row if "WAIT" not in c] for row in cells(tmp_path / "ours.csv")] == [
        list(map(str, ours.instructions(r))) for r in range(RANKS)
    ]


def cannot_block(schedule):
    """Whether the messages come to an end on one communicator that all ranks share."""
    return Model(remove_tail(remove_unshards(schedule)), "rank").accepts()


ONE_CHAIN = [
    name
    for name, build in BUILDERS.items()
    if (s := build(4, 8)) and len(s.flows) == 1 and s.ops <= COMPUTE and not s.forward_only and not s.slices
]


@given(schedules(ONE_CHAIN))
def test_what_is_written_for_torch_has_torchs_own_frame_around_its_compute(schedule):
    """UNSHARD, RESHARD and REDUCE_GRAD stand where torch's lowering puts them, and shared communicators
    cannot block.
    """
    text = to_torch_csv(schedule)
    read = from_csv(text)
    assert cannot_block(read)
    for rank in range(schedule.ranks):
        actions = [
            torch_schedules._Action.from_str(str(i)) for i in compute_only(schedule).instructions(rank)
        ]
        frame = torch_schedules._add_reduce_grad(
            torch_schedules._add_unshard_reshard(actions), schedule.microbatches
        )
        row = text.splitlines()[rank].split(",")
        assert [c for c in row if "SEND" not in c and "RECV" not in c] == [str(action) for action in frame]


@given(schedules(ONE_CHAIN))
def test_a_file_with_waits_says_what_the_one_without_says(schedule):
    """Waits for sends stand where ``send_completion`` says, and block no rank for ever; one for a reduction
    follows it.
    """
    text, bare = (to_torch_csv(schedule, waits=waits) for waits in (True, False))
    rows = [line.split(",") for line in text.splitlines()]
    assert [[c for c in row if "WAIT_" not in c] for row in rows] == [s.split(",") for s in bare.splitlines()]
    read = from_csv(text)
    assert read == from_csv(bare) and to_csv(read, waits=True) == text
    for rank, row in enumerate(rows):
        assert waits_of(row) == completed(read, rank)
        for before, cell in pairwise(row):
            assert ("WAIT_REDUCE_GRAD" in cell) == (before == cell.replace("WAIT_", "") != cell)
    assert blocked(read, rows) == []


def blocked(schedule, rows):
    """The cells at which ranks stay, where a wait holds up its rank until the peer has begun to receive."""
    places, sent, received = [0] * len(rows), set(), set()

    def message(i):
        return i.op.value[-1], i.stage if i.op in SENDS else schedule.other_end(i), i.microbatch

    def inputs(i, rank):
        for op, stage, microbatch, *_ in parts_of(i):
            before = schedule.predecessor(stage) if op is Op.F else schedule.successor(stage)
            if op in (Op.F, Op.B, Op.I) and before is not None and schedule.placement[before] != rank:
                yield "F" if op is Op.F else "B", before, microbatch

    def goes_on(cell, rank):
        i = parse_instruction(cell.replace("WAIT_", ""))
        if "WAIT_SEND" in cell:
            return message(i) in received
        if i.op in COMMUNICATION:
            (sent if i.op in SENDS else received).add(message(i))
        return sent.issuperset(inputs(i, rank))

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while places[rank] < len(row) and goes_on(row[places[rank]], rank):
                places[rank], moved = places[rank] + 1, True
    return [row[place] for row, place in zip(rows, places, strict=True) if place < len(row)]


def test_the_model_finds_a_wait_that_blocks():
    rows = [["0F0", "0SEND_F0", "0WAIT_SEND_F0", "0SEND_F1"], ["1RECV_F1", "1F1", "1RECV_F0"]]
    assert blocked(BUILDERS["gpipe"](2, 2), rows) == ["0WAIT_SEND_F0", "1F1"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            "0F0,0WAIT_SEND_F0,0SEND_F0,0RECV_B0,0B0",
            r"\(rank 0\), column 2: '0WAIT_SEND_F0' waits for 0SEND_F0",
        ),
        ("0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0,0WAIT_SEND_F0", r"column 6: .*or has a wait already"),
        ("0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_B0", r"column 5: '0WAIT_SEND_B0' waits for 0SEND_B0, which"),
        ("0F0,0SEND_F0,0RECV_B0,0WAIT_RECV_B0,0B0", r"column 4: '0WAIT_RECV_B0' waits for 0RECV_B0"),
        ("0F0,0SEND_F0,0RECV_B0,0B0,1WAIT_SEND_B0", r"column 5: '1WAIT_SEND_B0' waits for 1SEND_B0, which"),
        ("0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_REDUCE_GRAD", r"column 5: .* waits for 0REDUCE_GRAD, which"),
    ],
)
def test_waits_without_what_they_wait_for_are_refused(row, message):
    with pytest.raises(FormatError, match=message):
        from_csv(f"{row}\n1RECV_F0,1F0,1B0,1SEND_B0\n")


def test_the_file_is_for_the_torch_that_is_installed(monkeypatch):
    """Without one, as where schedules alone are of interest, for the newest."""

    def file_for(found):
        monkeypatch.setattr(importlib.metadata, "version", found)
        return "WAIT" in to_torch_csv(BUILDERS["gpipe"](2, 2))

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    assert ("WAIT" in to_torch_csv(BUILDERS["gpipe"](2, 2))) is WAITS
    versions = ("2.11.0+cpu", "2.14.1", "2.15.0a0+git1", "2.15.0", "2.20.1", "3.0.0")
    assert [file_for(lambda name, v=v: v) for v in versions] == [False, False, True, True, True, True]
    assert file_for(missing)


def test_messages_of_many_peers_share_a_queue():
    """With one queue per pair of ranks only, torch's one communicator of NCCL would block here."""
    schedule = interleaved_1f1b(3, 8)
    assert not cannot_block(place_communication(schedule))
    assert cannot_block(from_csv(to_torch_csv(schedule)))


def test_lowered_again_it_is_the_same():
    schedule = BUILDERS["zbv"](3, 6)
    text = to_torch_csv(schedule)
    assert to_torch_csv(from_csv(text)) == to_torch_csv(allocate_slots(place_communication(schedule))) == text


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (BUILDERS["dualpipe"](2, 4), "dualpipe has 2 chains of stages, torch's runtime runs one"),
        (BUILDERS["inference"](2, 4), "inference has no backward"),
        (
            BUILDERS["deepspeed_train"](2, 4),
            "deepspeed_train has LOAD, REDUCE_TIED, STEP, which torch's runtime cannot read",
        ),
        (insert_offloads(BUILDERS["gpipe"](2, 4)), "gpipe has FETCH, OFFLOAD, which"),
        (append_tail(BUILDERS["gpipe"](2, 4)), "gpipe has STEP, which"),
        (replace(BUILDERS["gpipe"](3, 4), skips=((0, 2),)), r"gpipe has skip connections such as \(0, 2\)"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_torch_cannot_read_is_refused_by_name(schedule, message):
    with pytest.raises(ValueError, match=message):
        to_torch_csv(schedule)


def test_the_compute_of_a_refused_schedule_can_be_written():
    schedule = compute_only(BUILDERS["deepspeed_train"](2, 4))
    assert from_csv(to_torch_csv(schedule)).counts.keys() >= {"F", "B", "REDUCE_GRAD"}
    assert "STEP" not in to_csv(schedule)
