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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple

from .schedule.builders import BUILDERS
from .schedule.instruction import COMMUNICATION, COMPUTE, SENDS, Instruction, Op
from .schedule.passes.place_communication import place_communication
from .schedule.schedule import Program, Schedule

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
        raise ValueError(f"no schedule of {names} has at most {max_ranks} ranks and {max_microbatches} microbatches")

    def build(draw: DrawFn) -> Schedule:
        name = draw(st.sampled_from(possible))
        schedule = BUILDERS[name](**dict(draw(st.sampled_from(_arguments(name, *bounds)))))
        place = draw(st.booleans()) if lowered is None else lowered
        return place_communication(schedule) if place and not schedule.lowered else schedule

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
        site = draw(st.sampled_from(mutation.sites(schedule)))
        return mutation.apply(schedule, site)

    return st.composite(build)()


def _hypothesis() -> Any:
    try:
        from hypothesis import strategies
    except ImportError:
        raise ImportError("ppfunc.testing makes Hypothesis strategies: install it, as in `pip install hypothesis`") from None
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
    """Where an instruction stands.

    Args:
        rank: the rank whose program it is in.
        step: the number of its step in the program.
        position: its position in the step.
    """

    rank: int
    step: int
    position: int


class _Mutation(NamedTuple):
    """One way to break a schedule: ``sites`` lists the places where it applies, ``apply`` breaks one of them."""

    sites: Callable[[Schedule], list[Any]]
    apply: Callable[[Schedule, Any], Schedule]


def _places(schedule: Schedule) -> Iterator[tuple[_Place, Instruction]]:
    """List the compute instructions and messages: none of them may be missing or be there twice."""
    for rank, program in enumerate(schedule.programs):
        for step, instructions in enumerate(program):
            for position, instruction in enumerate(instructions):
                if instruction.op in COMPUTE | COMMUNICATION:
                    yield _Place(rank, step, position), instruction


def _at(schedule: Schedule, place: _Place) -> Instruction:
    return schedule.programs[place.rank][place.step][place.position]


def _replaced(schedule: Schedule, place: _Place, *instructions: Instruction) -> Schedule:
    """Put ``instructions`` in the place of one."""
    program = schedule.programs[place.rank]
    step = program[place.step]
    step = (*step[: place.position], *instructions, *step[place.position + 1 :])
    return _with_program(schedule, place.rank, (*program[: place.step], step, *program[place.step + 1 :]))


def _with_program(schedule: Schedule, rank: int, program: Program) -> Schedule:
    return replace(schedule, programs=(*schedule.programs[:rank], program, *schedule.programs[rank + 1 :]))


def _named(schedule: Schedule, fault: str) -> Schedule:
    return replace(schedule, name=f"{schedule.name}: {fault}")


def _everywhere(schedule: Schedule) -> list[_Place]:
    return [place for place, _ in _places(schedule)]


def _missing(schedule: Schedule, place: _Place) -> Schedule:
    return _named(_replaced(schedule, place), f"{_at(schedule, place)} is missing")


def _doubled(schedule: Schedule, place: _Place) -> Schedule:
    instruction = _at(schedule, place)
    return _named(_replaced(schedule, place, instruction, instruction), f"{instruction} is there twice")


def _elementary_compute(schedule: Schedule) -> list[_Place]:
    return [place for place, i in _places(schedule) if i.op in COMPUTE and not i.parts]


def _out_of_range(schedule: Schedule, place: _Place) -> Schedule:
    wrong = _at(schedule, place)._replace(microbatch=schedule.microbatches)
    return _named(_replaced(schedule, place, wrong), f"{_at(schedule, place)} became {wrong}")


def _movable(schedule: Schedule) -> list[_Place]:
    return _elementary_compute(schedule) if schedule.ranks > 1 else []


def _misplaced(schedule: Schedule, place: _Place) -> Schedule:
    """Move an instruction to the end of the next rank, which does not hold its stage."""
    instruction, other = _at(schedule, place), (place.rank + 1) % schedule.ranks
    without = _replaced(schedule, place)
    moved = _with_program(without, other, (*without.programs[other], (instruction,)))
    return _named(moved, f"{instruction} is on rank {other}")


def _forwards_before_backwards(schedule: Schedule) -> list[tuple[_Place, _Place]]:
    """Pair the places of a forward and of the backward of the same stage and microbatch."""
    places = {(i.op, i.stage, i.microbatch): place for place, i in _places(schedule) if i.op in COMPUTE and not i.parts}
    return [
        (place, places[op, stage, microbatch])
        for (kind, stage, microbatch), place in places.items()
        for op in (Op.B, Op.I)
        if kind is Op.F and (op, stage, microbatch) in places
    ]


def _backward_first(schedule: Schedule, site: tuple[_Place, _Place]) -> Schedule:
    forward, backward = (_at(schedule, place) for place in site)
    exchanged = _replaced(_replaced(schedule, site[0], backward), site[1], forward)
    return _named(exchanged, f"{backward} is before {forward}")


def _pairs_of_sends(schedule: Schedule) -> list[tuple[_Place, _Place]]:
    """Pair the places of two messages, one after the other, that a stage sends to one receiver."""
    last: dict[Any, _Place] = {}
    pairs = []
    for place, i in _places(schedule):
        if i.op in SENDS:
            key = (place.rank, i.op, i.stage, i.peer)
            if key in last:
                pairs.append((last[key], place))
            last[key] = place
    return pairs


def _crossed(schedule: Schedule, site: tuple[_Place, _Place]) -> Schedule:
    first, second = (_at(schedule, place) for place in site)
    exchanged = _replaced(_replaced(schedule, site[0], second), site[1], first)
    return _named(exchanged, f"{second} is before {first}")


def _rings(schedule: Schedule) -> list[tuple[_Place, _Place, _Place, _Place]]:
    """List, per edge between ranks and microbatches a, b, the places of F(b), B(a) at its source, then at its target."""
    places = {(i.op is not Op.F, i.stage, i.microbatch): place for place, i in _places(schedule) if i.op in (Op.F, Op.B, Op.I)}
    rings = []
    for chain in schedule.chains:
        for source, target in pairwise(chain.stages):
            for a, b in pairwise(chain.microbatches):
                keys = ((False, source, b), (True, source, a), (False, target, b), (True, target, a))
                if schedule.placement[source] != schedule.placement[target] and all(key in places for key in keys):
                    f_source, b_source, f_target, b_target = (places[key] for key in keys)
                    rings.append((f_source, b_source, f_target, b_target))
    return rings


def _ring(schedule: Schedule, site: tuple[_Place, _Place, _Place, _Place]) -> Schedule:
    """Let the source do B(a) before F(b), and the target F(b) before B(a): each waits for the other."""
    f_source, b_source, f_target, b_target = site
    wrong = schedule
    for early, late in ((b_source, f_source), (f_target, b_target)):
        if late < early:
            first, second = _at(schedule, late), _at(schedule, early)
            wrong = _replaced(_replaced(wrong, late, second), early, first)
    backward, forward = _at(schedule, b_source), _at(schedule, f_target)
    return _named(wrong, f"{_at(schedule, f_source)} waits for {backward} and {forward}, and they for it")


_MUTATIONS = (
    _Mutation(_everywhere, _missing),
    _Mutation(_everywhere, _doubled),
    _Mutation(_elementary_compute, _out_of_range),
    _Mutation(_movable, _misplaced),
    _Mutation(_forwards_before_backwards, _backward_first),
    _Mutation(_pairs_of_sends, _crossed),
    _Mutation(_rings, _ring),
)
