"""Compute time and memory of a schedule on paper."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, compress
from operator import itemgetter, sub
from typing import Any

from ppfunc._checks import require_type, show_table, table

from ..collector import collector_paused
from ..costs import Costs, Number, require_costs
from ..dataflow import Dataflow
from ..errors import require_schedule, schedule_error
from ..instruction import COMMUNICATION, COMPUTE, MOVES, TAIL, Instruction, Op
from ..schedule import Schedule
from .earliest import BESIDE, EarliestTimes, Time, earliest
from .states import HELD, elementary

_TIMED = (Op.UNSHARD, Op.OFFLOAD, Op.FETCH, *TAIL)
_BUSY = COMPUTE | {Op.STEP}
_COUNTED = _BUSY | BESIDE | MOVES


@dataclass(frozen=True, repr=False)
class Timeline:
    """Start and end of every instruction, and the figures that follow from them.

    Args:
        schedule: the one that ran, or would run.
        makespan: from 0 to the last end of compute, a reduction or an optimizer step.
        span: largest over the ranks of that end minus the first start of compute.
        bubble: share of the makespan in which ranks neither compute nor step their optimizers, on average.
        span_bubble: the same share of the span.
        idle: per rank, the time of the makespan in which it does neither.
        peak_activations: per rank, the largest memory held for backwards, in the unit of the costs.
        starts: per rank, the start of every instruction in the order of its program.
        ends: per rank, the end of every instruction. A message lasts from the end of its producer
            until it is there, at both ends, an OFFLOAD until its copy ends, for which compute waits. Loads
            and RESHARD take no time.
        measured: the times are seconds of a step that ran; else they are simulated, in the unit of the costs.
    """

    schedule: Schedule
    makespan: Time
    span: Time
    bubble: Time
    span_bubble: Time
    idle: tuple[Time, ...]
    peak_activations: tuple[Number, ...]
    starts: tuple[tuple[Time, ...], ...]
    ends: tuple[tuple[Time, ...], ...]
    measured: bool = False

    def __repr__(self) -> str:
        return (
            f"Timeline(ranks={len(self.starts)}, makespan={self.makespan!r}, span={self.span!r},"
            f" bubble={float(self.bubble):.4g}, peak_activations={max(self.peak_activations, default=0)!r})"
        )

    def __str__(self) -> str:
        """Write the figures of the whole, and a line per rank."""
        whole = f"makespan {float(self.makespan):.4g}, bubble {float(self.bubble):.1%}"
        whole += f"; span {float(self.span):.4g}, bubble of the span {float(self.span_bubble):.1%}"
        rows = (
            (r, self.makespan - idle, idle, peak)
            for r, (idle, peak) in enumerate(zip(self.idle, self.peak_activations, strict=True))
        )
        return (
            f"{self.schedule.name}: {whole}\n{table(['rank', 'computes', 'idle', 'peak activations'], rows)}"
        )

    _repr_pretty_ = show_table

    def _repr_svg_(self) -> str | None:
        return self.schedule._repr_svg_(self)

    def rows(self) -> Iterator[Iterator[tuple[Instruction, Time, Time]]]:
        """Iterate over the ranks, and the instructions of each with their start and end."""
        for rank, times in enumerate(zip(self.starts, self.ends, strict=True)):
            yield zip(self.schedule.instructions(rank), *times, strict=True)

    def costs(self) -> Costs:
        """Return the median time of each kind per stage, and the shortest message that each stage sends.

        A message lasts until its receiver has waited for it, so the shortest is the nearest to its latency.
        Where a schedule has no I and W apart, each is half of B; memory is that of the default costs. What a
        measured OFFLOAD or FETCH takes is not known: the copies run beside compute, and only waits are seen.
        """
        from statistics import median  # here, because it loads slowly

        times: dict[tuple[Op, int], list[Time]] = {}
        for row in self.rows():
            for instruction, start, end in row:
                times.setdefault((instruction.op, instruction.stage), []).append(end - start)

        def of(op: Op) -> tuple[Time, ...]:
            return tuple(median(times.get((op, stage), [0])) for stage in range(self.schedule.stages))

        whole, halves = of(Op.B), [of(Op.I), of(Op.W)]
        for stage, time in enumerate(whole):
            if time and not halves[0][stage]:
                halves = [(*half[:stage], time / 2, *half[stage + 1 :]) for half in halves]
        sent = tuple(
            min(times.get((Op.SEND_F, s), []) + times.get((Op.SEND_B, s), []), default=0)
            for s in range(self.schedule.stages)
        )
        overlapped = of(Op.OVERLAP_F_B) if Op.OVERLAP_F_B in self.schedule.ops else None
        together = [i + w for i, w in zip(*halves, strict=True)]
        backward = tuple(b or both for b, both in zip(whole, together, strict=True))
        inputs, weights = halves
        unseen = MOVES if self.measured else {}
        timed = [op for op in (*_TIMED, Op.RECOMPUTE) if op in self.schedule.ops and op not in unseen]
        rest = {op.lower(): of(op) for op in timed}
        whole_apart = None if list(backward) == together else backward
        return Costs(of(Op.F), inputs, weights, whole_apart, overlapped, communication=sent, **rest)


@collector_paused()
def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run ``schedule`` on paper: each instruction starts once its rank is free and its inputs are there.

    A message delays its consumer on another rank and occupies no rank, so the times of a schedule
    are the same with and without its communications. Nor does a collective: those of a rank run beside its
    compute, one after the other, as if all that take part were there; the compute of a stage waits for its
    UNSHARD, and STEP for the reductions of its stage. Copies of residuals run beside compute, one after the
    other in each direction. One to the host begins with the end of its forward, and its OFFLOAD, after which
    the memory is free, waits for its end; one from the host begins at its FETCH, and the backward waits.

    Args:
        schedule: one that ``check`` accepts.
        costs: times and sizes; by default F = I = W = 1, B = 2, and all else takes no time.

    Raises:
        ScheduleError: a value that is no schedule, or an instruction that waits for something
            that can never come.
        ValueError, TypeError: costs for another number of stages, or no costs.

    >>> from ppfunc.schedule import one_f_one_b
    >>> timeline = simulate(one_f_one_b(ranks=4, microbatches=8), Costs(forward=1, backward=2))
    >>> timeline.makespan, timeline.idle, timeline.peak_activations
    (33, (9, 9, 9, 9), (4, 3, 2, 1))
    """
    require_schedule(schedule)
    costs = require_costs(costs).fitting(schedule.stages)
    single = {Op.F: "forward", Op.I: "backward_input", Op.W: "backward_weight"}
    pair_of = cache(costs.pair_of)
    times = earliest(
        schedule,
        lambda op, stage: costs.of(single[op], stage) if op in single else costs.time_of(op, stage),
        lambda f, b: pair_of(f.stage, b.stage, b.op is Op.B),
        lambda origin, _: costs.message_of(origin),
        {op: partial(costs.time_of, op) for op in _TIMED if op in schedule.ops},
    )
    return timeline_of(schedule, *_all_instructions(schedule, costs, times), costs)


def timeline_of(
    schedule: Schedule,
    starts: Sequence[Sequence[Time]],
    ends: Sequence[Sequence[Time]],
    costs: Costs | None = None,
    *,
    measured: bool = False,
) -> Timeline:
    """Make the timeline of given times: per rank, one per instruction of its program.

    Args:
        schedule: the one that ran, or would run.
        starts: when each instruction starts.
        ends: when it ends.
        costs: sizes of activations; by default 1 each.
        measured: the times are seconds of a step that ran.

    Raises:
        TypeError: not a row of times per rank.
        ValueError: the number of times is not that of the instructions.
    """
    require_schedule(schedule)
    costs = require_costs(costs).fitting(schedule.stages)
    for name, rows in (("starts", starts), ("ends", ends)):
        require_type(name, rows, Sequence, f"{schedule.ranks} rows of times, one per rank")
        if len(rows) != schedule.ranks:
            raise ValueError(
                f"{name}: got {len(rows)} rows of times, expected {schedule.ranks}, one per rank"
            )
        for rank, row in enumerate(rows):
            require_type(f"{name}[{rank}]", row, Sequence, "a row of times, one per instruction")
    busy, spans, makespan = [], [], 0
    for rank in range(schedule.ranks):
        ops = list(map(itemgetter(0), chain.from_iterable(schedule.programs[rank])))
        if not len(ops) == len(starts[rank]) == len(ends[rank]):
            raise ValueError(
                f"rank {rank} has {len(ops)} instructions, got {len(starts[rank])} starts and"
                f" {len(ends[rank])} ends"
            )
        compute = list(map(_BUSY.__contains__, ops))
        begins, stops = (list(compress(times[rank], compute)) for times in (starts, ends))
        last = max(compress(ends[rank], map(_COUNTED.__contains__, ops)), default=0)
        makespan = max(makespan, last)
        busy.append(sum(map(sub, stops, begins)))
        spans.append(last - min(begins, default=0))
    span = max(spans)
    return Timeline(
        schedule=schedule,
        makespan=makespan,
        span=span,
        bubble=_share_idle(busy, makespan),
        span_bubble=_share_idle(busy, span),
        idle=tuple(makespan - b for b in busy),
        peak_activations=peak_activations(schedule, costs),
        starts=tuple(map(tuple, starts)),
        ends=tuple(map(tuple, ends)),
        measured=measured,
    )


def peak_activations(schedule: Schedule, costs: Costs | None = None) -> tuple[Number, ...]:
    """Return the largest memory that each rank holds for its backwards.

    An activation is held from the start of its F to the end of its B, or of its I, after which
    its weight share is held until the end of its W; not while it is offloaded. One that is computed again is
    held during its F and from the start of its RECOMPUTE, its checkpoint in between.
    """
    require_schedule(schedule)
    costs = require_costs(costs)
    names, dropped = ("activation", "weight_share", "checkpoint"), schedule.recomputed
    sizes = [tuple(costs.of(name, s) for name in names) for s in range(schedule.stages)]
    kinds = {size: 3 * number for number, size in enumerate(dict.fromkeys(sizes))}
    kind = [kinds[size] for size in sizes]
    keep = 0 if schedule.forward_only else 1
    peaks = []
    for program in schedule.programs:
        # Whole activations and shares are counted by kind and only then multiplied, so that floats do not
        # drift.
        held = [0] * (3 * len(kinds))
        states = set()
        for op, stage, microbatch, _, _, _ in elementary(program):
            change, share = HELD.get(op, (0, 0))
            at, lasts = kind[stage], keep
            if dropped and (stage, microbatch) in dropped:
                held[at + 2] -= op is Op.RECOMPUTE
                lasts *= op is not Op.F
            if change > 0:
                held[at] += 1
                states.add(tuple(held))
                held[at] += lasts - 1
            else:
                held[at] += change * lasts
                held[at + 1] += share
            if lasts < keep:
                held[at + 2] += 1
        memory = [
            sum(
                size * (state[at] + share * state[at + 1]) + c * state[at + 2]
                for (size, share, c), at in kinds.items()
            )
            for state in states
        ]
        peaks.append(max(memory, default=0))
    return tuple(peaks)


def _share_idle(busy: Sequence[Time], time: Time) -> Time:
    return (len(busy) * time - sum(busy)) / (len(busy) * time) if time else 0


def _all_instructions(schedule: Schedule, costs: Costs, times: EarliestTimes) -> tuple[Sequence, Sequence]:
    """Extend the times of instructions that have a cost to all instructions."""
    if schedule.ops <= COMPUTE:
        return times.starts, times.ends
    flow = Dataflow(schedule)
    # Per end of a message: by microbatch, when its value is there, and how long it takes.
    carried: dict[object, tuple[Mapping[Any, Time], Time]] = {}
    nothing: tuple[Mapping[Any, Time], Time] = {}, 0
    for end, route in flow.routes.items():
        value = route.first // schedule.stages
        carried[end] = (times.done.get(value, {}), costs.message_of(flow.place(value)[0]))
    starts: list[list[Time]] = [[] for _ in schedule.programs]
    ends: list[list[Time]] = [[] for _ in schedule.programs]
    for rank, program in enumerate(schedule.programs):
        note_start, note_end = starts[rank].append, ends[rank].append
        timed = zip(times.starts[rank], times.ends[rank], strict=True)
        now: Time = 0
        for step, instructions in enumerate(program):
            for place, instruction in enumerate(instructions):
                op, stage, microbatch, peer, _, _ = instruction
                if op in _COUNTED:
                    first, last = next(timed)
                    now = now if op in BESIDE else max(now, last)
                elif op in COMMUNICATION:
                    made, delay = carried.get((op, stage, peer), nothing)
                    if microbatch not in made:
                        raise schedule_error(
                            schedule, rank, (step, place), "nothing computes what this message carries"
                        )
                    first = made[microbatch]
                    last = first + delay
                else:
                    first = last = now
                note_start(first)
                note_end(last)
    return starts, ends
