"""Draw schedules, placements and costs with Hypothesis.

For property tests of all that works on schedules: a builder, a pass, an engine or a cost model of your own.

>>> from hypothesis import given, settings
>>> from ppfunc.schedule import check
>>> @settings(max_examples=5)
... @given(schedules(names=["1f1b", "zbv"], lowered=True))
... def test_every_schedule_is_proved(schedule):
...     assert check(schedule).digest == schedule.digest
>>> test_every_schedule_is_proved()
"""

import inspect
from collections.abc import Iterable
from fractions import Fraction
from functools import cache
from itertools import product
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ppfunc._checks import require_counts
from ppfunc.parallel import Placement, loop, v_shape
from ppfunc.schedule import BUILDERS, Costs, Instruction, Op, Schedule, place_communication, single_chain
from ppfunc.schedule.planner.search import build

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = ["costs", "placements", "programs", "schedules"]

_Arguments = tuple[tuple[str, Any], ...]
_WHOLE = tuple(n for n, build in BUILDERS.items() if "slices" not in inspect.signature(build).parameters)


def schedules(
    names: Iterable[str] | None = None,
    *,
    max_ranks: int = 4,
    max_microbatches: int = 8,
    max_chunks: int = 3,
    lowered: bool | None = None,
) -> "SearchStrategy[Schedule]":
    """Draw valid schedules of the builders, with every combination of arguments that they accept.

    Args:
        names: names as ``ppfunc list`` prints them; by default all whose microbatches are no slices.
        max_ranks: largest number of ranks.
        max_microbatches: largest number of microbatches, slices of all sequences counted.
        max_chunks: largest number of stages per rank, where that is a choice.
        lowered: whether communication is placed; None draws both kinds.

    Raises:
        ValueError: an unknown name, or bounds within which none of the builders has a schedule.
        ImportError: Hypothesis is not installed.
    """
    st = _strategies()
    chosen = _WHOLE if names is None else tuple(names)
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

    def drawn(draw: "DrawFn") -> Schedule:
        name = draw(st.sampled_from(possible))
        schedule = BUILDERS[name](**dict(draw(st.sampled_from(_arguments(name, *bounds)))))
        place = draw(st.booleans()) if lowered is None else lowered
        return place_communication(schedule) if place and not schedule.has_messages else schedule

    return st.composite(drawn)()


def placements(*, max_ranks: int = 4, max_chunks: int = 3) -> "SearchStrategy[Placement]":
    """Draw placements: loops, waves, and any other in which every rank holds a stage.

    Args:
        max_ranks: largest number of ranks.
        max_chunks: largest number of stages per rank, on average.
    """
    require_counts(max_ranks=max_ranks, max_chunks=max_chunks)
    st = _strategies()

    def drawn(draw: "DrawFn") -> Placement:
        ranks, chunks = draw(st.integers(1, max_ranks)), draw(st.integers(1, max_chunks))
        anywhere = st.permutations(
            [*range(ranks), *(draw(st.integers(0, ranks - 1)) for _ in range(ranks * chunks - ranks))]
        )
        return tuple(
            draw(st.one_of(st.sampled_from([loop(ranks, chunks), v_shape(ranks, chunks)]), anywhere))
        )

    return st.composite(drawn)()


def costs(stages: int) -> "SearchStrategy[Costs]":
    """Draw whole costs of stages: times, messages, memory.

    Args:
        stages: number of stages, each of which may have numbers of its own.
    """
    require_counts(stages=stages)
    st = _strategies()
    times, sizes = (
        st.one_of(st.integers(least, 9), st.lists(st.integers(least, 9), min_size=stages, max_size=stages))
        for least in (0, 1)
    )
    return st.builds(
        Costs,
        forward=times, backward_input=times, backward_weight=times, communication=times,
        activation=sizes, weight_share=st.sampled_from([0, Fraction(2, 5), 1]), parameters=times,
    )  # fmt: skip


def programs(
    *, max_ranks: int = 4, max_microbatches: int = 8, max_chunks: int = 3
) -> "SearchStrategy[Schedule]":
    """Draw schedules that no builder makes: compute alone, in any order in which a rank could work.

    Some have whole backwards, some input and weight gradients apart, some both.

    Args:
        max_ranks: largest number of ranks.
        max_microbatches: largest number of microbatches.
        max_chunks: largest number of stages per rank, on average.

    >>> from hypothesis import given, settings
    >>> from ppfunc.schedule import check, place_communication
    >>> @settings(max_examples=5)
    ... @given(programs())
    ... def test_any_order_can_be_placed(schedule):
    ...     check(place_communication(schedule))
    >>> test_any_order_can_be_placed()
    """
    require_counts(max_microbatches=max_microbatches)
    st = _strategies()
    placed = placements(max_ranks=max_ranks, max_chunks=max_chunks)

    def drawn(draw: "DrawFn") -> Schedule:
        placement, microbatches = draw(placed), draw(st.integers(1, max_microbatches))
        last = len(placement) - 1
        ready = [Instruction(Op.F, 0, m) for m in range(microbatches)]
        rows: list[list[Instruction]] = [[] for _ in range(max(placement) + 1)]
        while ready:
            op, stage, m = (done := ready.pop(draw(st.integers(0, len(ready) - 1))))[:3]
            rows[placement[stage]].append(done)
            if op is Op.F and stage < last:
                ready.append(Instruction(Op.F, stage + 1, m))
            elif op is Op.F or (op is not Op.W and stage):
                before = stage if op is Op.F else stage - 1
                ready.append(Instruction(draw(st.sampled_from([Op.B, Op.I])), before, m))
            if op is Op.I:
                ready.append(Instruction(Op.W, stage, m))
        return single_chain("drawn", placement, microbatches, rows)

    return st.composite(drawn)()


def _strategies() -> ModuleType:
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
        "sequences": range(1, max_microbatches + 1),
        "slices": range(1, 4),
        "chunks": range(1, max_chunks + 1),
        "group": (None, *range(1, max_microbatches + 1)),
        "order": ("source", "head"),
    }
    taken = [n for n in inspect.signature(BUILDERS[name]).parameters if n in choices]
    candidates = (tuple(zip(taken, values, strict=True)) for values in product(*(choices[n] for n in taken)))
    made = ((arguments, build(name, **dict(arguments))) for arguments in candidates)
    return tuple(a for a, schedule in made if schedule and schedule.microbatches <= max_microbatches)
