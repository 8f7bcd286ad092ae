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
from collections.abc import Callable, Iterable
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
        fitting = [mutation for mutation in _MUTATIONS if mutation.sites(schedule)]
        mutation = draw(st.sampled_from(fitting))
        changes, fault = mutation.apply(schedule, draw(st.sampled_from(mutation.sites(schedule))))
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


_Changes = dict[_Place, tuple[Instruction, ...]]  # what stands in a place instead


class _Mutation(NamedTuple):
    """Break a schedule in one way: ``sites`` lists where, ``apply`` returns the changes and the fault."""

    sites: Callable[[Schedule], list[Any]]
    apply: Callable[[Schedule, Any], tuple[_Changes, str]]


def _changed(schedule: Schedule, changes: _Changes) -> Schedule:
    programs = (
        tuple(
            tuple(new for n, i in enumerate(instructions) for new in changes.get(_Place(rank, step, n), (i,)))
            for step, instructions in enumerate(program)
        )
        for rank, program in enumerate(schedule.programs)
    )
    return replace(schedule, programs=tuple(programs))


def _places(schedule: Schedule) -> dict[_Place, Instruction]:
    """Find the compute instructions and messages: none of them may be missing or be there twice."""
    return {
        _Place(rank, step, position): instruction
        for rank, program in enumerate(schedule.programs)
        for step, instructions in enumerate(program)
        for position, instruction in enumerate(instructions)
        if instruction.op in COMPUTE | COMMUNICATION
    }


def _elementary_compute(schedule: Schedule) -> list[_Place]:
    return [place for place, i in _places(schedule).items() if i.op in COMPUTE and not i.parts]


def _missing(schedule: Schedule, place: _Place) -> tuple[_Changes, str]:
    return {place: ()}, f"{_places(schedule)[place]} is missing"


def _doubled(schedule: Schedule, place: _Place) -> tuple[_Changes, str]:
    instruction = _places(schedule)[place]
    return {place: (instruction, instruction)}, f"{instruction} is there twice"


def _out_of_range(schedule: Schedule, place: _Place) -> tuple[_Changes, str]:
    right = _places(schedule)[place]
    wrong = right._replace(microbatch=schedule.microbatches)
    return {place: (wrong,)}, f"{right} became {wrong}"


def _to_be_moved(schedule: Schedule) -> list[tuple[_Place, _Place]]:
    """Pair each compute instruction with the last place of the next rank, if that is another rank."""
    last = {place.rank: place for place in _places(schedule)}
    pairs = ((place, last[(place.rank + 1) % schedule.ranks]) for place in _elementary_compute(schedule))
    return [(place, other) for place, other in pairs if place.rank != other.rank]


def _misplaced(schedule: Schedule, site: tuple[_Place, _Place]) -> tuple[_Changes, str]:
    moved, last = (_places(schedule)[place] for place in site)
    return {site[0]: (), site[1]: (last, moved)}, f"{moved} is on rank {site[1].rank}"


def _forwards_before_backwards(schedule: Schedule) -> list[tuple[_Place, _Place]]:
    """Pair the places of a forward and of the backward of the same stage and microbatch."""
    places = {_places(schedule)[place]: place for place in _elementary_compute(schedule)}
    return [
        (place, places[backward])
        for forward, place in places.items()
        for backward in (forward._replace(op=Op.B), forward._replace(op=Op.I))
        if forward.op is Op.F and backward in places
    ]


def _pairs_of_sends(schedule: Schedule) -> list[tuple[_Place, _Place]]:
    """Pair the places of two messages, one after the other, that a stage sends to one receiver."""
    rows: dict[Any, list[_Place]] = {}
    for place, i in _places(schedule).items():
        if i.op in SENDS:
            rows.setdefault((place.rank, i.op, i.stage, i.peer), []).append(place)
    return [pair for row in rows.values() for pair in pairwise(row)]


def _exchanged(schedule: Schedule, site: tuple[_Place, _Place]) -> tuple[_Changes, str]:
    first, second = (_places(schedule)[place] for place in site)
    return {site[0]: (second,), site[1]: (first,)}, f"{second} is before {first}"


def _rings(schedule: Schedule) -> list[tuple[_Place, _Place, _Place, _Place]]:
    """List the places of F(b), B(a) at source and target, per crossing edge and microbatches a, b."""
    places = {
        (i.op is not Op.F, i.stage, i.microbatch): place
        for place, i in _places(schedule).items()
        if i.op in (Op.F, Op.B, Op.I)
    }
    rings = []
    for source, target in schedule.crossing_edges:
        for a, b in (
            pair for c in schedule.chains if source in c.stages for pair in pairwise(c.microbatches)
        ):
            keys = ((False, source, b), (True, source, a), (False, target, b), (True, target, a))
            if all(key in places for key in keys):
                rings.append((places[keys[0]], places[keys[1]], places[keys[2]], places[keys[3]]))
    return rings


def _ring(schedule: Schedule, site: tuple[_Place, _Place, _Place, _Place]) -> tuple[_Changes, str]:
    """Let the source do B(a) before F(b), and the target F(b) before B(a): each waits for the other."""
    f_source, b_source, f_target, b_target = site
    at = _places(schedule)
    changes: _Changes = {}
    for early, late in ((b_source, f_source), (f_target, b_target)):
        if late < early:
            changes |= {early: (at[late],), late: (at[early],)}
    return changes, f"{at[f_source]} waits for {at[b_source]} and {at[f_target]}, and they for it"


_MUTATIONS = (
    _Mutation(lambda schedule: list(_places(schedule)), _missing),
    _Mutation(lambda schedule: list(_places(schedule)), _doubled),
    _Mutation(_elementary_compute, _out_of_range),
    _Mutation(_to_be_moved, _misplaced),
    _Mutation(_forwards_before_backwards, _exchanged),
    _Mutation(_pairs_of_sends, _exchanged),
    _Mutation(_rings, _ring),
)
