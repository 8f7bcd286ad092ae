"""Our compute orders beside those of the installed torch.distributed.pipelining."""

from __future__ import annotations

import pytest
import torch.distributed.pipelining.schedules as schedules

import ppfunc.schedule.builders as ours
from ppfunc.schedule.schedule import Schedule


class Stage:
    """What torch's schedule classes read of a stage while they make their order."""

    def __init__(self, index: int, ranks: int, stages: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_rank, self.group_size = 0, ranks
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.submod, self.has_backward = None, False
        self.stage_index_to_group_rank = {s: s % ranks for s in range(stages)}


def torch_order(kind: str, ranks: int, microbatches: int, chunks: int, v_shaped: bool) -> list[list[str]]:
    """The text of every action of every rank in torch's order, idle places left out."""
    held = (0, 2 * ranks - 1) if v_shaped else range(0, ranks * chunks, ranks)
    stages = [Stage(s, ranks, ranks * chunks) for s in held]
    made = getattr(schedules, kind)(
        stages[0] if kind == "ScheduleGPipe" else stages, microbatches, loss_fn=_loss
    )
    order = made.pipeline_order
    return [
        [str(a) for a in order[r] if a is not None and not str(a).endswith("REDUCE_GRAD")]
        for r in range(ranks)
    ]


def _loss(output: object, target: object) -> None:
    """Never called: torch refuses a schedule with backward and no loss."""


def our_order(schedule: Schedule) -> list[list[str]]:
    """The text of every instruction of every rank."""
    return [[str(i) for i in schedule.instructions(r)] for r in range(schedule.ranks)]


@pytest.fixture(autouse=True)
def order_only(monkeypatch):
    """torch's classes place their communication at once; only the order before it is compared here."""
    monkeypatch.setattr(schedules._PipelineScheduleRuntime, "_prepare_schedule_with_comms", lambda *_: None)


def divides(ranks: int, microbatches: int) -> bool:
    """Whether torch's interleaved classes accept the number of microbatches."""
    return microbatches % max(1, microbatches // ranks) == 0


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize(
    ("kind", "build", "chunks", "v_shaped", "accepts"),
    [
        ("ScheduleGPipe", lambda p, m, v: ours.gpipe(p, m), (1,), False, lambda p, m: True),
        ("ScheduleLoopedBFS", ours.looped_bfs, (1, 2, 3), False, lambda p, m: True),
        ("ScheduleInterleaved1F1B", ours.interleaved_1f1b, (1, 2, 3, 4), False, divides),
        ("ScheduleInterleavedZeroBubble", ours.interleaved_zb, (1, 2, 3, 4), False, divides),
        ("ScheduleZBVZeroBubble", lambda p, m, v: ours.zbv(p, m), (2,), True, lambda p, m: True),
        ("ScheduleDualPipeV", lambda p, m, v: ours.dualpipev(p, m), (2,), True, lambda p, m: m >= 2 * p),
    ],
)
def test_the_order_is_torchs(kind, build, chunks, v_shaped, accepts, ranks):
    """Where torch accepts the number of microbatches, fewer than ranks included, with every number of
    chunks.
    """
    for microbatches in filter(lambda m: accepts(ranks, m), range(1, 25)):
        for v in chunks:
            theirs = torch_order(kind, ranks, microbatches, v, v_shaped)
            assert our_order(build(ranks, microbatches, v)) == theirs, (ranks, microbatches, v)
