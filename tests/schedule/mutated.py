"""Break schedules in one place, so that ``check`` has something to refuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from hypothesis import strategies as st

from ppfunc.schedule.instruction import COMMUNICATION, COMPUTE, SENDS, Instruction, Op
from ppfunc.schedule.schedule import Schedule
from ppfunc.testing import schedules


def mutated_schedules(valid: st.SearchStrategy[Schedule] | None = None) -> st.SearchStrategy[Schedule]:
    """Draw schedules with one thing wrong, which their name says; ``check`` must refuse all of them.

    A compute instruction or a message is missing, doubled, out of range or on another rank, a
    backward stands before its forward, two ranks wait for one another, or two messages of a pair of
    ranks are in the wrong order at one end.
    """
    source = schedules() if valid is None else valid

    def build(draw: st.DrawFn) -> Schedule:
        schedule = draw(source)
        places = _places(schedule)
        kinds = [faults for kind in _KINDS if (faults := list(kind(schedule, places)))]
        changes, fault = draw(st.sampled_from(draw(st.sampled_from(kinds))))
        return replace(_changed(schedule, changes), name=f"{schedule.name}: {fault}")

    return st.composite(build)()


class _Place(NamedTuple):
    """Locate an instruction: rank, index of the step in its program, position in the step."""

    rank: int
    step: int
    position: int


_Places = dict[_Place, Instruction]
_Changes = dict[_Place, tuple[Instruction, ...]]  # what stands in a place instead


_Faults = Iterator[tuple[_Changes, str]]  # the ways to break a schedule of one kind, and what is wrong then


def _changed(schedule: Schedule, changes: _Changes) -> Schedule:
    programs = (
        tuple(
            tuple(new for n, i in enumerate(instructions) for new in changes.get(_Place(rank, step, n), (i,)))
            for step, instructions in enumerate(program)
        )
        for rank, program in enumerate(schedule.programs)
    )
    return replace(schedule, programs=tuple(programs))


def _places(schedule: Schedule) -> _Places:
    """Find the compute instructions and messages: none of them may be missing or be there twice."""
    return {
        _Place(rank, step, position): instruction
        for rank, program in enumerate(schedule.programs)
        for step, instructions in enumerate(program)
        for position, instruction in enumerate(instructions)
        if instruction.op in COMPUTE | COMMUNICATION
    }


def _missing(schedule: Schedule, places: _Places) -> _Faults:
    return (({place: ()}, f"{i} is missing") for place, i in places.items())


def _doubled(schedule: Schedule, places: _Places) -> _Faults:
    return (({place: (i, i)}, f"{i} is there twice") for place, i in places.items())


def _out_of_range(schedule: Schedule, places: _Places) -> _Faults:
    for place, right in _elementary_compute(places):
        wrong = right._replace(microbatch=schedule.microbatches)
        yield {place: (wrong,)}, f"{right} became {wrong}"


def _misplaced(schedule: Schedule, places: _Places) -> _Faults:
    """Move a compute instruction behind the last place of the next rank, if that is another rank."""
    ends = {place.rank: place for place in places}
    for place, moved in _elementary_compute(places):
        end = ends[(place.rank + 1) % schedule.ranks]
        if end.rank != place.rank:
            yield {place: (), end: (places[end], moved)}, f"{moved} is on rank {end.rank}"


def _too_early(schedule: Schedule, places: _Places) -> _Faults:
    """Exchange a forward and the backward of the same stage and microbatch."""
    at = {i: place for place, i in _elementary_compute(places)}
    for forward in (i for i in at if i.op is Op.F):
        for backward in (forward._replace(op=Op.B), forward._replace(op=Op.I)):
            if backward in at:
                yield _exchanged(places, at[forward], at[backward])


def _out_of_order(schedule: Schedule, places: _Places) -> _Faults:
    """Exchange two messages, one after the other, that a stage sends to one receiver."""
    rows: dict[Any, list[_Place]] = {}
    for place, i in places.items():
        if i.op in SENDS:
            rows.setdefault((place.rank, i.op, i.stage, i.peer), []).append(place)
    return (_exchanged(places, *pair) for row in rows.values() for pair in pairwise(row))


def _rings(schedule: Schedule, places: _Places) -> _Faults:
    """Let the source of a crossing edge do B(a) before F(b), and the target F(b) before B(a), so that each
    waits for the other.
    """
    at = {
        (i.op is Op.F, i.stage, i.microbatch): place
        for place, i in places.items()
        if i.op in (Op.F, Op.B, Op.I)
    }
    for source, target in schedule.crossing_edges:
        for a, b in (
            pair for c in schedule.chains if source in c.stages for pair in pairwise(c.microbatches)
        ):
            keys = [(True, source, b), (False, source, a), (True, target, b), (False, target, a)]
            if not all(key in at for key in keys):
                continue
            forward, backward, received, sent = (at[key] for key in keys)
            changes: _Changes = {}
            for early, late in ((backward, forward), (received, sent)):
                if late < early:
                    changes |= _exchanged(places, late, early)[0]
            text = f"{places[forward]} waits for {places[backward]} and {places[received]}"
            yield changes, f"{text}, and they for it"


def _elementary_compute(places: _Places) -> Iterator[tuple[_Place, Instruction]]:
    return ((place, i) for place, i in places.items() if i.op in COMPUTE and not i.parts)


def _exchanged(places: _Places, first: _Place, second: _Place) -> tuple[_Changes, str]:
    changes: _Changes = {first: (places[second],), second: (places[first],)}
    return changes, f"{places[second]} is before {places[first]}"


_KINDS = (_missing, _doubled, _out_of_range, _misplaced, _too_early, _out_of_order, _rings)
