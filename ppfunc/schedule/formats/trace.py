"""Write a schedule in time as a Chrome trace, which opens in Perfetto (ui.perfetto.dev) and chrome://tracing,
and read it again.

One track per rank, one slice per compute instruction and optimizer step, one arrow per message, from the end
of the instruction that makes the value to the start of the one that consumes it; more tracks for collectives
and for copies to and from the host that take time, which run beside compute. Times are whole nanoseconds, so
that slices of a track never overlap. Beside the events stands the timeline itself, which viewers show as
metadata and which :func:`from_trace` reads::

    "ppfunc": {"schedule": {...}, "starts": [[...], ...], "ends": [[...], ...], "peak_activations": [...],
               "measured": false, "origin": 0, "seconds": false, "share": 1}
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import ceil, inf, isfinite, nextafter
from typing import Any, NamedTuple, Self

from ppfunc._checks import naming_arguments, shown

from ..instruction import COMPUTE, KINDS, FormatError, Instruction, Op, Unit, microbatch_of, parts_of
from ..json import load, read, read_schedule_at, simple, to_json
from ..proof.structure import check_structure
from ..proof.timeline import Timeline, simulate, timeline_of
from ..schedule import Schedule
from .grid import Bar, bars_of

_TraceEvent = dict[str, Any]
_KEY = "ppfunc"
_TIME = simple(
    "a time: a finite number from 0", lambda value: type(value) in (int, float) and 0 <= value <= 1e100
)
_TRUTH = simple("true or false", lambda value: isinstance(value, bool))
_FORM = {
    "schedule": read_schedule_at,
    "starts": [[_TIME]],
    "ends": [[_TIME]],
    "peak_activations": [_TIME],
    "measured": _TRUTH,
    "origin": simple("nanoseconds from 1970", lambda value: type(value) is int and value >= 0),
    "seconds": _TRUTH,
    "share": _TIME,
}
_TRACKS: dict[Unit | None, str] = {
    Unit.RANK: "",
    Unit.COLLECTIVE: ", collectives",
    Unit.OUT: ", copies to the host",
    Unit.IN: ", copies from the host",
}
_UNITS = list(_TRACKS)
_BESIDE = [op for op, kind in KINDS.items() if kind.unit in _TRACKS and op not in COMPUTE]


@naming_arguments
def to_trace(schedule: Schedule | Timeline, *, profiles: Iterable[str | Mapping[str, Any]] = ()) -> str:
    """Return the trace of a schedule in time as JSON text.

    Seconds stay seconds there; of times without a unit, 1 is a millisecond.

    Args:
        schedule: schedule, which is simulated with the default costs; or a timeline of a schedule, simulated
            or measured (see :func:`~ppfunc.schedule.proof.timeline.timeline_of`).
        profiles: traces of ``torch.profiler`` of any ranks, as JSON text or documents, to put beside the
            timeline that ``step.record`` has returned, on one axis of time.

    Raises:
        ScheduleError: ``schedule`` is no schedule.
        TypeError: ``profiles`` is one profile.
        ValueError: profiles, and times of which it is not known when they were.
        FormatError: a profile is no trace of ``torch.profiler``.
    """
    if isinstance(profiles, str | bytes | Mapping) or not isinstance(profiles, Iterable):
        raise TypeError(f"profiles: got {shown(profiles)}, expected a list of profiles, of one rank each")
    timeline = schedule if isinstance(schedule, Timeline) else simulate(schedule)
    schedule = timeline.schedule
    beside = [event for n, profile in enumerate(profiles) for event in _on_axis(timeline, n, profile)]
    # Viewers drop what begins before 0.
    begin = max(0, *(ceil(-event["ts"]) for event in beside if "ts" in event)) if beside else 0
    beside = [event | {"ts": event["ts"] + begin} if "ts" in event else event for event in beside]
    microseconds = 1e6 if timeline.seconds else 1000.0
    rows = [
        [_Slice.of(rank, bar, microseconds, begin) for bar in row]
        for rank, row in enumerate(bars_of(timeline))
    ]
    bars = (
        _Slice.of(
            rank + schedule.ranks * _UNITS.index(KINDS[bar.instruction.op].unit), bar, microseconds, begin
        )
        for rank, row in enumerate(bars_of(timeline, _BESIDE))
        for bar in row
        if bar.end > bar.start
    )
    slices = [*(piece for row in rows for piece in row), *bars]
    events = [
        *_names(schedule, {piece.track for piece in slices}),
        *(piece.event() for piece in slices),
        *_arrows(schedule, rows),
        *beside,
    ]
    lines = ",\n".join(json.dumps(event) for event in events)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n],\n"{_KEY}": {_data(timeline)}}}\n'


@naming_arguments
def from_trace(trace: str | dict[str, Any]) -> Timeline:
    """Read the timeline of a trace that :func:`to_trace` has written, in the unit that it had there.

    Args:
        trace: JSON text, or the document that it holds.

    Raises:
        FormatError: it is no such trace.
        ScheduleError: what it holds is no schedule.

    >>> from ppfunc.schedule import gpipe, simulate
    >>> timeline = simulate(gpipe(ranks=2, microbatches=2))
    >>> from_trace(to_trace(timeline)) == timeline
    True
    """
    document = load(trace) if isinstance(trace, str) else trace
    if not isinstance(document, dict) or not isinstance(document.get(_KEY), dict):
        raise FormatError(f"$.{_KEY}: missing: only a trace that ppfunc has written holds its schedule")
    data = read(f"$.{_KEY}", document[_KEY], _FORM)
    check_structure(data["schedule"])
    peaks, ranks = data["peak_activations"], data["schedule"].ranks
    if len(peaks) != ranks:
        raise FormatError(f"$.{_KEY}.peak_activations: expected {ranks} numbers, got {len(peaks)}")
    try:
        timeline = timeline_of(
            data["schedule"], data["starts"], data["ends"], measured=data["measured"], origin=data["origin"]
        )
    except ValueError as error:
        raise FormatError(f"$.{_KEY}: {error}") from None
    return replace(timeline, peak_activations=peaks, seconds=data["seconds"], share=data["share"])


def _on_axis(timeline: Timeline, number: int, profile: str | Mapping[str, Any]) -> Iterator[_TraceEvent]:
    """Yield the events of a trace of torch.profiler, in microseconds from time 0 of a timeline.

    Its processes and arrows get names that other profiles, and the ranks, do not have.
    """
    if not timeline.origin:
        raise ValueError(
            "profiles: got some beside a timeline that does not say when it began; give the timeline that"
            " step.record has returned, or leave them out"
        )
    try:
        document = load(profile) if isinstance(profile, str) else profile
        later = (int(document["baseTimeNanoseconds"]) - timeline.origin) / 1000
        for event in document["traceEvents"]:
            moved = {"ts": event["ts"] + later} if "ts" in event else {}
            if not isfinite(moved.get("ts", 0)):
                raise ValueError(f"the time {event['ts']}")
            yield event | moved | {key: f"{number}: {event[key]}" for key in ("pid", "id") if key in event}
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        expected = "the text of a trace of torch.profiler: read_text() of a file of export_chrome_trace"
        raise FormatError(f"profiles[{number}]: got {shown(profile)}, expected {expected}") from error


def _data(timeline: Timeline) -> str:
    def numbers(values: Any) -> list[Any]:
        return [value if isinstance(value, int) else float(value) for value in values]

    starts, ends = (json.dumps([numbers(row) for row in rows]) for rows in (timeline.starts, timeline.ends))
    peaks, (share,) = (numbers(row) for row in (timeline.peak_activations, [timeline.share]))
    rest = {name: getattr(timeline, name) for name in ("measured", "origin", "seconds")} | {"share": share}
    return (
        f'{{"schedule": {to_json(timeline.schedule).strip()},\n"starts": {starts},\n"ends":'
        f' {ends},\n"peak_activations": {json.dumps(peaks)},\n{json.dumps(rest)[1:]}'
    )


def _names(schedule: Schedule, tracks: set[int]) -> Iterator[_TraceEvent]:
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": schedule.name}}
    for track in sorted(tracks.union(range(schedule.ranks))):
        beside, rank = divmod(track, schedule.ranks)
        name = f"rank {rank}{_TRACKS[_UNITS[beside]]}"
        yield {"ph": "M", "pid": 0, "tid": track, "name": "thread_name", "args": {"name": name}}
        yield {
            "ph": "M",
            "pid": 0,
            "tid": track,
            "name": "thread_sort_index",
            "args": {"sort_index": len(_TRACKS) * rank + beside},
        }


class _Slice(NamedTuple):
    """An instruction on its track, in whole nanoseconds."""

    instruction: Instruction
    track: int
    start: int
    end: int

    @classmethod
    def of(cls, track: int, bar: Bar, microseconds: float, begin: int) -> Self:
        start, end = (round(time * microseconds * 1000) + 1000 * begin for time in (bar.start, bar.end))
        return cls(bar.instruction, track, start, end)

    def event(self) -> _TraceEvent:
        return {
            "ph": "X",
            "pid": 0,
            "tid": self.track,
            "ts": _microseconds(self.start),
            "dur": _microseconds(self.end - self.start),
            "name": str(self.instruction),
            "cat": self.instruction.op.value,
            "args": {"stage": self.instruction.stage, "microbatch": self.instruction.microbatch},
        }


def _microseconds(nanoseconds: int) -> float:
    """Convert to microseconds that a viewer truncates to the same nanoseconds; for times up to ten days."""
    time = nanoseconds / 1000
    return time if int(time * 1000) == nanoseconds else nextafter(time, inf)


def _arrows(schedule: Schedule, rows: list[list[_Slice]]) -> Iterator[_TraceEvent]:
    """Write a pair of events per message; ``bp: e`` ends the arrow at the slice around its time."""
    forward, backward = _places(rows, (Op.F,)), _places(rows, (Op.B, Op.I))
    number = 0
    for source, target in schedule.crossing_edges:
        shift = schedule.shift(source, target)
        for name, made, used in (
            ("activation", forward.get(source, {}), forward.get(target, {})),
            ("gradient", backward.get(target, {}), backward.get(source, {})),
        ):
            for microbatch in sorted(made):
                if microbatch + shift not in used or (shift and not schedule.joins(microbatch, shift)):
                    continue
                number += 1
                shared = {"pid": 0, "id": number, "name": name, "cat": "message"}
                giver, taker = made[microbatch], used[microbatch + shift]
                # A moment before the end: at the very end the arrow would begin at the next slice.
                sent = max(giver.start, giver.end - 1)
                yield {"ph": "s", "tid": giver.track, "ts": _microseconds(sent), **shared}
                # Clocks of two hosts agree only so far, and an arrow never goes back in time.
                yield {
                    "ph": "f",
                    "bp": "e",
                    "tid": taker.track,
                    "ts": _microseconds(max(sent, taker.start)),
                    **shared,
                }


def _places(rows: list[list[_Slice]], ops: tuple[Op, ...]) -> dict[int, dict[int, _Slice]]:
    """Find the slice of the instruction of each stage and microbatch."""
    places: dict[int, dict[int, _Slice]] = {}
    for row in rows:
        for piece in row:
            for part in parts_of(piece.instruction):
                if part.op in ops:
                    places.setdefault(part.stage, {})[microbatch_of(part)] = piece
    return places
