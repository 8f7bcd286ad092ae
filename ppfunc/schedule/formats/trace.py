"""Write a schedule in time as a Chrome trace, which opens in Perfetto (ui.perfetto.dev) and chrome://tracing.

One track per rank, one slice per instruction that takes time, one arrow per message, from the end of
the instruction that makes the value to the start of the one that consumes it.
"""

import json
from collections.abc import Iterator
from typing import Any

from ..instruction import Op, parts_of
from ..schedule import Schedule
from ..simulate import Timeline, simulate
from .grid import Bar, compute_bars

_TraceEvent = dict[str, Any]
_Place = tuple[int, float, float]


def to_trace(schedule: Schedule, timeline: Timeline | None = None, *, microseconds: float = 1000.0) -> str:
    """Return the trace of ``schedule`` as JSON text.

    Args:
        schedule: the one that ran, or would run.
        timeline: start and end of every instruction, simulated or measured (see
            :func:`ppfunc.schedule.simulate.timeline_of`); by default simulated with the default costs.
        microseconds: how long one unit of the timeline is in the trace; 1e6 for seconds.
    """
    rows = compute_bars(schedule, simulate(schedule) if timeline is None else timeline)
    events = [
        *_names(schedule),
        *(_slice(rank, bar, microseconds) for rank, row in enumerate(rows) for bar in row),
        *_arrows(schedule, rows, microseconds),
    ]
    lines = ",\n".join(json.dumps(event) for event in events)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'


def _names(schedule: Schedule) -> Iterator[_TraceEvent]:
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": schedule.name}}
    for rank in range(schedule.ranks):
        yield {"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "pid": 0, "tid": rank, "name": "thread_sort_index", "args": {"sort_index": rank}}


def _slice(rank: int, bar: Bar, microseconds: float) -> _TraceEvent:
    instruction = bar.instruction
    return {
        "ph": "X",
        "pid": 0,
        "tid": rank,
        "ts": bar.start * microseconds,
        "dur": (bar.end - bar.start) * microseconds,
        "name": str(instruction),
        "cat": instruction.op.value,
        "args": {"stage": instruction.stage, "microbatch": instruction.microbatch},
    }


def _arrows(schedule: Schedule, rows: list[list[Bar]], microseconds: float) -> Iterator[_TraceEvent]:
    """A pair of events per message; ``bp: e`` ends the arrow at the slice that encloses its time."""
    forward, backward = _places(rows, (Op.F,)), _places(rows, (Op.B, Op.I))
    number = 0
    for source, target in schedule.crossing_edges:
        for name, made, used in (
            ("activation", forward.get(source, {}), forward.get(target, {})),
            ("gradient", backward.get(target, {}), backward.get(source, {})),
        ):
            for microbatch in made.keys() & used.keys():
                number += 1
                shared = {"pid": 0, "id": number, "name": name, "cat": "message"}
                (rank, start, end), (taker, taken, _) = made[microbatch], used[microbatch]
                # A thousandth before the end: at the very end the arrow would begin at the next slice.
                yield {"ph": "s", "tid": rank, "ts": (end - (end - start) / 1000) * microseconds, **shared}
                yield {"ph": "f", "bp": "e", "tid": taker, "ts": taken * microseconds, **shared}


def _places(rows: list[list[Bar]], ops: tuple[Op, ...]) -> dict[int, dict[int | None, _Place]]:
    """Rank, start and end of the instruction of each stage and microbatch."""
    places: dict[int, dict[int | None, _Place]] = {}
    for rank, row in enumerate(rows):
        for bar in row:
            for part in parts_of(bar.instruction):
                if part.op in ops:
                    places.setdefault(part.stage, {})[part.microbatch] = (rank, bar.start, bar.end)
    return places
