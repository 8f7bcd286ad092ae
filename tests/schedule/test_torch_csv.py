"""torch's own CSV files are read, and ours load in torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from hypothesis import given

from ppfunc.schedule import (
    BUILDERS,
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
from ppfunc.schedule.certificate import check
from ppfunc.schedule.instruction import COMMUNICATION, COMPUTE
from ppfunc.testing import schedules
from tests.schedule.reference import Model

RANKS, MICROBATCHES = 3, 6
KINDS = {
    "ScheduleInterleaved1F1B": "interleaved_1f1b",
    "ScheduleLoopedBFS": "looped_bfs",
    "ScheduleInterleavedZeroBubble": "interleaved_zb",
    "ScheduleZBVZeroBubble": "zbv",
    "ScheduleDualPipeV": "dualpipev",
}


class Stage:
    """What torch's schedule classes read of a stage while they make their order."""

    def __init__(self, index: int, stages: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_rank, self.group_size = 0, RANKS
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.submod, self.has_backward = None, False


def torch_schedule(kind: str):
    held = (0, 2 * RANKS - 1) if kind in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV") else (0, RANKS)
    stages = [Stage(s, 2 * RANKS) for s in held]
    return getattr(torch_schedules, kind)(stages, MICROBATCHES, loss_fn=lambda output, target: None)


@pytest.mark.parametrize("kind", KINDS)
def test_what_torch_writes_is_read(kind, tmp_path):
    theirs = torch_schedule(kind)
    theirs._dump_csv(tmp_path / "compute.csv", format="compute_only")
    theirs._dump_csv(tmp_path / "comms.csv", format="compute_comms")
    ours = BUILDERS[KINDS[kind]](RANKS, MICROBATCHES)
    for form in ("compute", "comms"):
        read = read_schedule(tmp_path / f"{form}.csv")
        assert (read.name, read.placement, read.chains) == (form, ours.placement, ours.chains)
        for rank, actions in theirs.pipeline_order.items():
            expected = [str(action) for action in actions if action is not None]
            assert [str(i) for i in read.instructions(rank) if i.op in COMPUTE] == expected
        assert read.has_messages == (form == "comms")
        assert check(read).microbatches == MICROBATCHES


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lowered", [False, True])
def test_what_we_write_loads_in_torch(kind, lowered, tmp_path):
    ours = BUILDERS[KINDS[kind]](RANKS, MICROBATCHES)
    ours = place_communication(ours) if lowered else ours
    (tmp_path / "ours.csv").write_text(to_csv(ours))
    theirs = torch_schedule(kind)
    theirs._load_csv(tmp_path / "ours.csv", format="compute_comms" if lowered else "compute_only")
    loaded = theirs.pipeline_order_with_comms if lowered else theirs.pipeline_order
    assert [[str(action) for action in loaded[r]] for r in range(RANKS)] == [
        list(map(str, ours.instructions(r))) for r in range(RANKS)
    ]


def cannot_block(schedule):
    """Whether the messages come to an end on one communicator that all ranks share."""
    return Model(remove_tail(remove_unshards(schedule)), "rank").accepts()


ONE_CHAIN = [
    name
    for name, build in BUILDERS.items()
    if (s := build(4, 8)) and len(s.chains) == 1 and s.ops <= COMPUTE and not s.forward_only
]


@given(schedules(ONE_CHAIN))
def test_what_is_written_for_torch_has_torchs_own_frame_around_its_compute(schedule):
    """UNSHARD, RESHARD and REDUCE_GRAD stand where torch's lowering puts them, and shared communicators
    cannot block.
    """
    read = from_csv(to_torch_csv(schedule))
    assert cannot_block(read)
    for rank in range(schedule.ranks):
        actions = [
            torch_schedules._Action.from_str(str(i)) for i in compute_only(schedule).instructions(rank)
        ]
        frame = torch_schedules._add_reduce_grad(
            torch_schedules._add_unshard_reshard(actions), schedule.microbatches
        )
        assert [str(i) for i in read.instructions(rank) if i.op not in COMMUNICATION] == [
            str(action) for action in frame
        ]


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
