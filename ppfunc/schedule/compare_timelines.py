"""Compare a measured timeline with the one on paper: where the time of a step goes, by rank and kind of
instruction.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from ppfunc._checks import require_type, show_table

from .instruction import COMPUTE, RECEIVES, Op, parts_of
from .schedule import Schedule
from .timeline import Timeline

_KINDS = {
    Op.F: "F",
    Op.B: "B",
    Op.I: "I",
    Op.W: "W",
    Op.RECOMPUTE: "recomputed",
    Op.OVERLAP_F_B: "overlapped",
}
_UNEVEN = 1.1  # times as long as the others is worth a word


@dataclass(frozen=True, repr=False)
class Comparison:
    """Two timelines of one schedule side by side; ``str`` is a table and one line that says what stands out.

    Args:
        measured, simulated: the timelines. They may have different units: all figures are shares of the
            makespan.
        shares: per rank, by kind of instruction (``"F"``, ``"B"``, ``"I"``, ``"W"``, ``"overlapped"``,
            ``"idle"``), the share of the makespan as measured, and on paper.
        waits: per rank, by message such as ``"1RECV_F"``, the share of the makespan in which the rank does
            nothing until messages of that stage and kind are there, as measured.
        stages: per stage, how many times as long its F and B take as those of the other stages in the median,
            as measured.
        summary: one line.
    """

    measured: Timeline
    simulated: Timeline
    shares: tuple[dict[str, tuple[float, float]], ...]
    waits: tuple[dict[str, float], ...]
    stages: tuple[float, ...]
    summary: str

    def __repr__(self) -> str:
        return f"Comparison({self.summary!r})"

    def __str__(self) -> str:
        kinds = [kind for kind in (*_KINDS.values(), "idle") if any(kind in row for row in self.shares)]
        lines = [
            "rank  " + "  ".join(f"{kind:>15}" for kind in kinds),
            "      " + "  ".join("measured  paper" for _ in kinds),
        ]
        for rank, row in enumerate(self.shares):
            cells = (row.get(kind, (0.0, 0.0)) for kind in kinds)
            lines.append(f"{rank:4}  " + "  ".join(f"{mine:8.1%} {paper:6.1%}" for mine, paper in cells))
        return "\n".join([*lines, self.summary])

    _repr_pretty_ = show_table


def compare(measured: Timeline, simulated: Timeline) -> Comparison:
    """Say where a measured step differs from the step on paper.

    Args:
        measured: such as ``step.record(...)`` returns.
        simulated: of the same schedule, such as ``simulate(schedule, measured.costs())``.

    Raises:
        ValueError: they are of different schedules.

    >>> from ppfunc.schedule import Costs, one_f_one_b, simulate
    >>> schedule = one_f_one_b(ranks=2, microbatches=4)
    >>> compare(simulate(schedule, Costs(forward=[1, 2], backward=[2, 4])), simulate(schedule)).summary
    'stage 1 is 2 times as long as the others'
    """
    for name, timeline in (("measured", measured), ("simulated", simulated)):
        require_type(name, timeline, Timeline, "a Timeline, as step.record(...)[1] or simulate(...) gives")
        if not timeline.makespan:
            raise ValueError(
                f"{name}: got a timeline in which nothing takes time, expected one with durations"
            )
    if measured.schedule.placement != simulated.schedule.placement or list(_computed(measured)) != list(
        _computed(simulated)
    ):
        raise ValueError(
            f"got timelines of {measured.schedule!r} and of {simulated.schedule!r}, expected those of one"
            " schedule"
        )
    rows = zip(_shares(measured), _shares(simulated), strict=True)
    shares = tuple(
        {k: (mine.get(k, 0.0), paper.get(k, 0.0)) for k in mine.keys() | paper.keys()} for mine, paper in rows
    )
    waits, stages = tuple(_waits(measured)), _times_as_long(measured)
    return Comparison(
        measured, simulated, shares, waits, stages, _summary(measured.schedule, waits, stages, shares)
    )


def _computed(timeline: Timeline) -> Iterator[tuple[str, ...]]:
    schedule = timeline.schedule
    return (
        tuple(str(i) for i in schedule.instructions(rank) if i.op in COMPUTE)
        for rank in range(schedule.ranks)
    )


def _shares(timeline: Timeline) -> list[dict[str, float]]:
    shares = []
    for row, idle in zip(timeline.rows(), timeline.idle, strict=True):
        of_rank: dict[str, float] = defaultdict(float)
        for instruction, start, end in row:
            if instruction.op in COMPUTE:
                of_rank[_KINDS[instruction.op]] += (end - start) / timeline.makespan
        shares.append(of_rank | {"idle": idle / timeline.makespan})
    return shares


def _waits(timeline: Timeline) -> Iterator[dict[str, float]]:
    """Yield for each rank the idle time before instructions, by the message that arrives last."""
    message = {Op.F: Op.RECV_F, Op.B: Op.RECV_B, Op.I: Op.RECV_B}
    for row in timeline.rows():
        waits: dict[str, float] = defaultdict(float)
        received: set[tuple[Op | None, int, int | None]] = set()
        now = 0.0
        for instruction, start, end in row:
            if instruction.op in RECEIVES:
                received.add(instruction[:3])
            elif instruction.op in COMPUTE:
                ends = ((message.get(part.op), *part[1:3]) for part in parts_of(instruction))
                awaited = next((f"{stage}{op}" for op, stage, m in ends if (op, stage, m) in received), None)
                if awaited and start > now:
                    waits[awaited] += float(start - now) / float(timeline.makespan)
                now = end
        yield dict(waits)


def _times_as_long(timeline: Timeline) -> tuple[float, ...]:
    costs = timeline.costs()
    lengths = [float(costs.of("forward", s) + costs.backward_of(s)) for s in range(timeline.schedule.stages)]
    others = [median([*lengths[:s], *lengths[s + 1 :]] or [lengths[s]]) for s in range(len(lengths))]
    return tuple(length / other if other else 1.0 for length, other in zip(lengths, others, strict=True))


def _summary(
    schedule: Schedule,
    waits: tuple[dict[str, float], ...],
    stages: tuple[float, ...],
    shares: tuple[dict[str, tuple[float, float]], ...],
) -> str:
    """Name the longest wait and its cause: a rank whose stages are all slow, else the slowest stage."""
    facts = []
    share, rank, name = max(
        ((share, rank, name) for rank, row in enumerate(waits) for name, share in row.items()),
        default=(0.0, 0, ""),
    )
    if share > 0.005:
        message = next(
            i for i in schedule.instructions(rank) if i.op in RECEIVES and f"{i.stage}{i.op.value}" == name
        )
        other = schedule.other_end(message)
        assert other is not None
        facts.append(
            f"rank {rank} waits {share:.0%} of the step for rank {schedule.placement[other]} ({name})"
        )
    longest = max(range(len(stages)), key=stages.__getitem__)
    if stages[longest] >= _UNEVEN:
        rank, own = schedule.placement[longest], schedule.stages_of(schedule.placement[longest])
        least = min(stages[stage] for stage in own)
        of_rank = len(own) > 1 and least >= _UNEVEN
        facts.append(
            f"rank {rank} is at least {least:.3g} times as slow as the others"
            if of_rank
            else f"stage {longest} is {stages[longest]:.3g} times as long as the others"
        )
    if not facts:
        mine, paper = (max(row["idle"][k] for row in shares) for k in (0, 1))
        facts.append(
            f"no rank waits for a message and no stage stands out; most idle is {mine:.0%}, on paper"
            f" {paper:.0%}"
        )
    return "; ".join(facts)
