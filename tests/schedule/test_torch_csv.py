"""torch's own CSV files are read, and ours load in torch."""

from __future__ import annotations

import pytest
import torch.distributed.pipelining.schedules as torch_schedules

from ppfunc.schedule import BUILDERS, place_communication, read_csv, write_csv
from ppfunc.schedule.check import check
from ppfunc.schedule.instruction import COMPUTE

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
        read = read_csv(tmp_path / f"{form}.csv")
        assert (read.name, read.placement, read.chains) == (form, ours.placement, ours.chains)
        for rank, actions in theirs.pipeline_order.items():
            expected = [str(action) for action in actions if action is not None]
            assert [str(i) for i in read.instructions(rank) if i.op in COMPUTE] == expected
        assert read.lowered == (form == "comms")
        assert check(read).microbatches == MICROBATCHES


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lowered", [False, True])
def test_what_we_write_loads_in_torch(kind, lowered, tmp_path):
    ours = BUILDERS[KINDS[kind]](RANKS, MICROBATCHES)
    ours = place_communication(ours) if lowered else ours
    write_csv(ours, tmp_path / "ours.csv")
    theirs = torch_schedule(kind)
    theirs._load_csv(tmp_path / "ours.csv", format="compute_comms" if lowered else "compute_only")
    loaded = theirs.pipeline_order_with_comms if lowered else theirs.pipeline_order
    assert [[str(action) for action in loaded[r]] for r in range(RANKS)] == [list(map(str, ours.instructions(r))) for r in range(RANKS)]
