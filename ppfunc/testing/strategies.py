"""Draw valid schedules with Hypothesis.

For property tests of anything that works on schedules: an engine of your own, a pass, a cost model.

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
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

from ppfunc.schedule import BUILDERS, Schedule, place_communication
from ppfunc.schedule.planner.starts import build

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
) -> "SearchStrategy[Schedule]":
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
    try:
        from hypothesis import strategies as st
    except ImportError:
        raise ImportError(
            "ppfunc.testing makes Hypothesis strategies: install it, as in `pip install hypothesis`"
        ) from None
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

    def drawn(draw: "DrawFn") -> Schedule:
        name = draw(st.sampled_from(possible))
        schedule = BUILDERS[name](**dict(draw(st.sampled_from(_arguments(name, *bounds)))))
        place = draw(st.booleans()) if lowered is None else lowered
        return place_communication(schedule) if place and not schedule.has_messages else schedule

    return st.composite(drawn)()


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
    return tuple(arguments for arguments in candidates if build(name, **dict(arguments)))
