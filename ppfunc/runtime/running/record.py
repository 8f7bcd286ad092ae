"""Record when the calls of a step run, on one clock for all ranks, as the timeline of its schedule; name them
to a profiler of torch.
"""

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import groupby
from math import inf
from pathlib import Path
from uuid import uuid4

import torch
from torch.profiler import record_function

from ppfunc.schedule import Instruction, Op, Schedule, Timeline, parts_of
from ppfunc.schedule.collector import collector_paused
from ppfunc.schedule.instruction import COMMUNICATION, SENDS
from ppfunc.schedule.proof.timeline import timeline_of
from ppfunc.stage.device import accelerates, record_event, synchronize

from ..ports.protocols import Call, Transport
from ..running.compile import CompiledStep
from ..values.buffers import Buffers, Origin, Tag

_ROUNDS = 4  # of a handshake, each of which narrows down the offset

Interval = tuple[float, float]  # start and end, in seconds
_UNAWAITED: Interval = -inf, -inf


class Recorder:
    """Notes the time after every call of a step: of the host, or of the stream of the accelerator where the
    stage computes.
    """

    def __init__(self) -> None:
        self._start = 0.0
        self._begun: dict[torch.device, torch.Event] = {}
        self._marks: list[tuple[torch.device, float | torch.Event]] = []

    def attach(self, compiled: CompiledStep) -> CompiledStep:
        """Return the same step, whose calls are noted."""
        lowered = compiled.lowered
        stages = (lowered.schedule.model_stages[place.instruction.stage] for place in compiled.places)
        devices = [lowered.form.devices[stage] for stage in stages]
        calls = (partial(self._run, *pair) for pair in zip(compiled.calls, devices, strict=True))
        return compiled._replace(
            calls=(partial(self._begin, frozenset(devices)), *calls),
            places=(*compiled.places[:1], *compiled.places),
        )

    def _begin(self, devices: Iterable[torch.device], buffers: Buffers) -> None:
        for device in devices:
            synchronize(device)
        self._marks, self._start = [], time.perf_counter()
        self._begun = {device: record_event(device, timing=True) for device in devices if accelerates(device)}

    def _run(self, call: Call, device: torch.device, buffers: Buffers) -> None:
        call(buffers)
        mark = record_event(device, timing=True) if accelerates(device) else time.perf_counter()
        self._marks.append((device, mark))

    def intervals(self) -> list[Interval]:
        """Return start and end of every call, by the clock of this host.

        A call starts when the one before it on the same device ends.
        """
        intervals, ends = list[Interval](), dict[torch.device, float]()
        for device in self._begun:
            synchronize(device)
        for device, mark in self._marks:
            if not isinstance(mark, float):
                mark = self._start + self._begun[device].elapsed_time(mark) / 1000
            intervals.append((ends.get(device, self._start), mark))
            ends[device] = mark
        return intervals


@collector_paused()
def in_ranges(compiled: CompiledStep) -> CompiledStep:
    """Return the same step, whose instructions are ranges to the profiler of torch that runs.

    A range has the text of its instruction and the rank at the other end of a message: ``ppfunc 2F0``,
    ``ppfunc 2SEND_F0 to rank 3``. A wait before it has a range of its own, ``ppfunc wait 3RECV_F0 from rank
    2``. Ranges lie within each other where a call serves several instructions, as messages that are posted
    together, and where the parts of an ``OVERLAP_F_B`` run in turn. An instruction without a call, such as a
    LOAD on the CPU, has no range. An evaluation also has ``ppfunc compare tied parameters`` and, of a
    trainer, ``ppfunc join losses``.
    """
    schedule, ranks = compiled.lowered.schedule, compiled.lowered.ranks
    here = [instruction for rank in ranks for instruction in schedule.instructions(rank)]
    pairs = {part: pair for pair in here for part in pair.parts}
    messages = {_tag(schedule, i): i for i in here if i.op in COMMUNICATION}

    def named(instruction: Instruction) -> str:
        if instruction.op not in COMMUNICATION:
            return str(instruction)
        sends, (_, source, destination, _) = instruction.op in SENDS, _tag(schedule, instruction)
        rank = schedule.placement[destination if sends else source]
        return f"{instruction} {'to' if sends else 'from'} rank {rank}"

    def path(place: Origin) -> list[str]:
        """Name the ranges of a call, from the outermost to the innermost."""
        rank, position, instruction, awaited = place
        step, op = schedule.programs[rank][position], instruction.op
        around = [str(pairs[instruction])] if instruction in pairs else []
        if isinstance(awaited, Op):
            microbatch = None if awaited is Op.UNSHARD else instruction.microbatch
            return [*around, f"wait {Instruction(awaited, instruction.stage, microbatch)}"]
        if awaited is not None:
            return [*around, f"wait {named(messages.get(awaited, instruction))}"]
        if op in COMMUNICATION:
            return [named(message) for message in step if message.op in COMMUNICATION]
        if op in _EVALUATED and op not in schedule.ops:
            return [_EVALUATED[op]]
        if op is Op.REDUCE_TIED:
            return [str(each) for each in here if each.op is op]
        return [*around, str(instruction)]

    rows = [(path(place), place, call) for place, call in zip(compiled.places, compiled.calls, strict=True)]
    groups = [[*group] for _, group in groupby(rows, lambda row: row[0][0])]
    return compiled._replace(
        calls=tuple(partial(_run_within, [(names, call) for names, _, call in group]) for group in groups),
        places=tuple(
            p._replace(instruction=pairs.get(p.instruction, p.instruction)) for (_, p, _), *_ in groups
        ),
    )


# Calls of an evaluation that have the place of an instruction which its schedule does not have.
_EVALUATED = {Op.REDUCE_TIED: "compare tied parameters", Op.STEP: "join losses"}


def _run_within(rows: Sequence[tuple[Sequence[str], Call]], buffers: Buffers) -> None:
    """Run calls in the ranges that are named beside them."""
    for first, group in groupby(rows, lambda row: row[0][:1]):
        if not first:
            for _, call in group:
                call(buffers)
        else:
            with record_function(f"ppfunc {first[0]}"):
                _run_within([(names[1:], call) for names, call in group], buffers)


def gather(compiled: CompiledStep, intervals: Sequence[Interval], control: Transport) -> Timeline:
    """Make the timeline of all ranks, from 0 on, in seconds. Collective.

    A compute instruction lasts as long as its call, without what it waits for. A message lasts from its
    posting by the sender until the receiver has waited for it, at both ends.

    Args:
        intervals: start and end of every call of this process, in seconds; of several steps the last counts.
    """
    schedule, ranks = compiled.lowered.schedule, compiled.lowered.ranks
    mine = {
        rank: _spans(schedule, rank, compiled.places, intervals[-len(compiled.places) :]) for rank in ranks
    }
    epoch = time.time_ns() - time.perf_counter_ns()
    told = [json.loads(text) for text in control.all_gather(json.dumps([_clock(), epoch, mine]))]
    distant = [rank for rank, (clock, _, _) in enumerate(told) if clock != told[0][0]]
    offsets = _offsets(control, ranks[0], distant) if distant else [0.0] * len(told)
    spans = {
        int(rank): [(a + offset, b + offset) for a, b in rows]
        for (_, _, found), offset in zip(told, offsets, strict=True)
        for rank, rows in found.items()
    }
    return _timeline(schedule, spans, told[0][1])


def _spans(
    schedule: Schedule, rank: int, places: Sequence[Origin], intervals: Sequence[Interval]
) -> list[Interval]:
    """Return start and end of every instruction of a rank; of a SEND its posting, of a RECV the wait.

    What is not waited for, as within a process, has been taken when it was sent.
    """
    at: dict[tuple[int, Instruction | None], Interval] = {}
    waited: dict[Tag, Interval] = {}
    for place, (start, end) in zip(places, intervals, strict=True):
        if place.rank != rank:
            continue
        op = place.instruction.op
        if isinstance(place.awaited, Tag):  # of a SEND it is not of interest: it has been received by then
            waited[place.awaited] = start, end
        elif place.awaited in (None, op):  # a gather lasts until it has been waited for
            key = place.position, None if op in COMMUNICATION else place.instruction
            at[key] = (at[key][0] if key in at else start), end
    found, now = [], intervals[0][0] if intervals else 0.0
    for position, step in enumerate(schedule.programs[rank]):
        for instruction in step:
            if instruction.op in SENDS:
                span = at.get((position, None), (now, now))
            elif instruction.op in COMMUNICATION:
                span = waited.get(_tag(schedule, instruction), _UNAWAITED)
            else:
                parts = [
                    at[position, part]
                    for part in (instruction, *parts_of(instruction))
                    if (position, part) in at
                ]
                span = (min(a for a, _ in parts), max(b for _, b in parts)) if parts else (now, now)
                now = max(now, span[1])
            found.append(span)
    return found


def _timeline(schedule: Schedule, spans: Mapping[int, Sequence[Interval]], epoch: int) -> Timeline:
    """Join all ranks: both ends of a message have its whole time.

    Args:
        epoch: nanoseconds from 1970 to 0 of the clock.
    """
    sent: dict[Tag, Interval] = {}
    taken: dict[Tag, Interval] = {}
    for rank, rows in spans.items():
        for instruction, span in zip(schedule.instructions(rank), rows, strict=True):
            if instruction.op in COMMUNICATION:
                (sent if instruction.op in SENDS else taken)[_tag(schedule, instruction)] = span
    messages = {tag: (sent[tag][0], max(sent[tag][0], taken[tag][1])) for tag in sent}
    every = [
        [
            messages[_tag(schedule, i)] if i.op in COMMUNICATION else span
            for i, span in zip(schedule.instructions(rank), spans[rank], strict=True)
        ]
        for rank in range(schedule.ranks)
    ]
    origin = min(start for rows in every for start, _ in rows)
    starts = [[start - origin for start, _ in rows] for rows in every]
    ends = [[end - origin for _, end in rows] for rows in every]
    return timeline_of(schedule, starts, ends, measured=True, origin=epoch + round(origin * 1e9))


@cache
def _clock() -> str:
    """Name the clock of this process: the boot of its host and its namespace of time, else one of its own."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/time")
    except OSError:
        return str(uuid4())


def _offsets(control: Transport, rank: int, distant: Sequence[int]) -> list[float]:
    """Measure the seconds from the clock of every rank to the clock of rank 0, by a handshake. Collective.

    Args:
        distant: the ranks with another clock.
    """
    offset = 0.0
    if rank == 0:
        for peer in distant:
            for _ in range(_ROUNDS):
                control.recv_text(peer)
                control.send_text(peer, repr(time.perf_counter()))
    elif rank in distant:
        least, most = -inf, inf
        for _ in range(_ROUNDS):
            before = time.perf_counter()
            control.send_text(0, "")
            theirs = float(control.recv_text(0))
            after = time.perf_counter()
            least, most = max(least, theirs - after), min(most, theirs - before)
        offset = (least + most) / 2
    return list(map(float, control.all_gather(repr(offset))))


def _tag(schedule: Schedule, message: Instruction) -> Tag:
    """Return the name of the message of a SEND or RECV."""
    other = schedule.other_end(message)
    assert other is not None and message.microbatch is not None
    source, destination = (message.stage, other) if message.op in SENDS else (other, message.stage)
    return Tag("F" if message.op in (Op.SEND_F, Op.RECV_F) else "B", source, destination, message.microbatch)
