"""Draw schedules with Hypothesis: valid ones, and broken ones that ``check`` must refuse.

For property tests of anything that works on schedules: an engine of your own, a pass, a cost model.

>>> from hypothesis import given, settings
>>> from ppfunc.schedule import check
>>> @settings(max_examples=5)
... @given(schedules(names=["1f1b", "zbv"], lowered=True))
... def test_every_schedule_is_proved(schedule):
...     assert check(schedule).digest == schedule.digest
>>> test_every_schedule_is_proved()
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple

from ppfunc.schedule.builders import BUILDERS
from ppfunc.schedule.instruction import COMMUNICATION, COMPUTE, SENDS, Instruction, Op
from ppfunc.schedule.passes.place_communication import place_communication
from ppfunc.schedule.schedule import Schedule

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

_Arguments = tuple[tuple[str, Any], ...]


def schedules(
    names: Iterable[str] | None = None,
    *,
    max_ranks: int = 4,
    max_microbatches: int = 8,
    max_chunks: int = 3,
    lowered: bool | None = None,
) -> SearchStrategy[Schedule]:
    """Draw valid schedules of the builders, with every combination of arguments that they accept.

    Args:
        names: names as ``ppfunc list`` prints them; by default all of them.
        max_ranks: largest number of ranks.
        max_microbatches: largest number of microbatches.
        max_chunks: largest number of stages per rank, where that is a choice.
        lowered: with communication placed, without, or either one (None).

    Raises:
        ValueError: an unknown name, or bounds within which none of the builders has a schedule.
        ImportError: Hypothesis is not installed.
    """
    st = _hypothesis()
    chosen = tuple(BUILDERS) if names is None else tuple(names)
    for name in chosen:
        if name not in BUILDERS:
            raise ValueError(f"unknown schedule {name!r}: expected names out of {', '.join(BUILDERS)}")
    bounds = (max_ranks, max_microbatches, max_chunks)
    possible = [name for name in chosen if _arguments(name, *bounds)]
    if not possible:
        names = ", ".join(chosen)
        raise ValueError(
            f"no schedule of {names} has at most {max_ranks} ranks and {max_microbatches} microbatches"
        )

    def build(draw: DrawFn) -> Schedule:
        name = draw(st.sampled_from(possible))
        schedule = BUILDERS[name](**dict(draw(st.sampled_from(_arguments(name, *bounds)))))
        place = draw(st.booleans()) if lowered is None else lowered
        return place_communication(schedule) if place and not schedule.has_messages else schedule

    return st.composite(build)()


def mutated_schedules(valid: SearchStrategy[Schedule] | None = None) -> SearchStrategy[Schedule]:
    """Draw schedules with one thing wrong, which their name says; ``check`` must refuse all of them.

    A compute instruction or a message is missing, doubled, out of range or on another rank, a
    backward stands before its forward, two ranks wait for one another, or two messages of a pair of
    ranks are in the wrong order at one end.

    >>> from hypothesis import given, settings
    >>> from ppfunc.schedule import ScheduleError, check
    >>> @settings(max_examples=5)
    ... @given(mutated_schedules())
    ... def test_nothing_broken_is_accepted(schedule):
    ...     try:
    ...         check(schedule)
    ...     except ScheduleError:
    ...         return
    ...     raise AssertionError(schedule.name)
    >>> test_nothing_broken_is_accepted()

    Args:
        valid: the schedules to break; by default ``schedules()``.

    Raises:
        ImportError: Hypothesis is not installed.
    """
    st = _hypothesis()
    source = schedules() if valid is None else valid

    def build(draw: DrawFn) -> Schedule:
        schedule = draw(source)
        places = _places(schedule)
        kinds = [faults for kind in _KINDS if (faults := list(kind(schedule, places)))]
        changes, fault = draw(st.sampled_from(draw(st.sampled_from(kinds))))
        return replace(_changed(schedule, changes), name=f"{schedule.name}: {fault}")

    return st.composite(build)()


def _hypothesis() -> Any:
    try:
        from hypothesis import strategies
    except ImportError:
        raise ImportError(
            "ppfunc.testing makes Hypothesis strategies: install it, as in `pip install hypothesis`"
        ) from None
    return strategies


@cache
def _arguments(name: str, max_ranks: int, max_microbatches: int, max_chunks: int) -> tuple[_Arguments, ...]:
    """List every set of arguments within the bounds that the builder ``name`` accepts."""
    choices = {
        "ranks": range(1, max_ranks + 1),
        "microbatches": range(1, max_microbatches + 1),
        "chunks": range(1, max_chunks + 1),
        "group": (None, *range(1, max_microbatches + 1)),
        "order": ("source", "head"),
    }
    taken = [n for n in inspect.signature(BUILDERS[name]).parameters if n in choices]
    candidates = (tuple(zip(taken, values, strict=True)) for values in product(*(choices[n] for n in taken)))
    return tuple(arguments for arguments in candidates if _accepts(name, dict(arguments)))


def _accepts(name: str, arguments: dict[str, Any]) -> bool:
    try:
        BUILDERS[name](**arguments)
    except ValueError:
        return False
    return True


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
