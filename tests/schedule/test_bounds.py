"""Lower bounds: against optima that a solver has proved, schedules of all builders, and the best known
values.
"""

from __future__ import annotations

import json
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from ppfunc.parallel import loop, v_shape
from ppfunc.schedule import BUILDERS, Costs, lower_bound, simulate, zb_h1, zb_h2
from tests.clock import busy

TABLE = [
    json.loads(line)
    for line in (Path(__file__).parent / "optima.jsonl").read_text().splitlines()
    if not line.startswith("#")
]
FIELDS = ("forward", "backward_input", "backward_weight", "communication", "activation", "weight_share")


def bound_of_row(row: dict) -> object:
    costs = Costs(**{name: row[name] for name in FIELDS})
    return lower_bound(costs, row["placement"], row["microbatches"], row["cap"], row["objective"])


def test_the_bound_is_never_above_the_optimum():
    assert len(TABLE) >= 150
    found = [bound_of_row(row).value for row in TABLE]
    assert [row for row, value in zip(TABLE, found, strict=True) if value > row["optimum"]] == []
    gaps = [1 - value / row["optimum"] for row, value in zip(TABLE, found, strict=True)]
    assert sum(gap == 0 for gap in gaps) > 0.45 * len(gaps)
    assert sum(gaps) / len(gaps) < 0.04


def test_fractions_give_the_bound_of_whole_numbers_and_floats_nearly():
    for row in TABLE[::5]:
        sevenths, floats = (
            {name: [number(t) for t in row[name]] for name in FIELDS[:4]}
            for number in (lambda t: Fraction(t, 7), float)
        )
        memory = {name: row[name] for name in FIELDS[4:]}
        rest = row["placement"], row["microbatches"], row["cap"], row["objective"]
        value = bound_of_row(row).value
        assert lower_bound(Costs(**sevenths, **memory), *rest).value == Fraction(value, 7)
        assert value - 4 < lower_bound(Costs(**floats, **memory), *rest).value <= value * (1 + 1e-12)


@given(
    st.sampled_from(sorted(BUILDERS)),
    st.integers(1, 5),
    st.integers(1, 10),
    st.sampled_from(["span", "makespan"]),
    st.data(),
)
def test_no_builder_is_faster_than_the_bound(name, p, m, objective, data):
    try:
        schedule = BUILDERS[name](p, m)
    except ValueError:
        return
    if schedule.forward_only or len(schedule.flows) > 1:
        return
    numbers = st.integers(0, 9)
    times = [
        data.draw(st.lists(numbers, min_size=schedule.stages, max_size=schedule.stages)) for _ in range(3)
    ]
    costs = Costs(
        *times,
        communication=data.draw(numbers),
        weight_share=data.draw(st.sampled_from([0, Fraction(1, 3), 1])),
    )
    timeline = simulate(schedule, costs)
    cap = [max(1, peak) for peak in timeline.peak_activations]
    assert getattr(timeline, objective) >= lower_bound(costs, schedule.placement, m, cap, objective).value


def test_the_bound_of_one_stage_per_rank_is_met():
    unit = Costs(weight_share=1)
    for p, m in ((2, 4), (4, 8), (8, 24)):
        assert simulate(zb_h1(p, m), unit).span == lower_bound(unit, loop(p), m, p).value
        assert simulate(zb_h2(p, m), unit).span == lower_bound(unit, loop(p), m, 2 * p - 1).value


def test_known_values_on_a_v():
    """The optimum of p = 4, m = 8 is 537; the others are shares of the span in which the busiest rank must
    wait.
    """
    costs = Costs(9, 9, 5, communication=1, weight_share=1)
    assert lower_bound(costs, v_shape(4), 8, 4, "makespan")[:2] == (525, "cycle")
    costs = Costs(18.522 / 2, 18.086 / 2, 9.337 / 2, communication=0.601, weight_share=1)
    found = {cap: 1 - 24 * 45.945 / lower_bound(costs, v_shape(8), 24, cap).value for cap in (8, 10, 12, 16)}
    assert {cap: round(bubble, 4) for cap, bubble in found.items()} == {
        8: 0.1950,
        10: 0.1671,
        12: 0.1371,
        16: 0.0703,
    }


def test_the_rank_that_binds_is_named():
    slow = Costs(forward=[1, 1, 5, 1], weight_share=1)
    assert lower_bound(slow, loop(4), 12, 8).rank == 2


def test_more_memory_never_raises_it_and_parameters_take_memory():
    costs = Costs(3, 4, 2, communication=1, weight_share=1)
    values = [lower_bound(costs, v_shape(4), 12, cap).value for cap in (2, 3, 4, 6, 8, 12, 24, None)]
    assert values == sorted(values, reverse=True)
    heavy = Costs(3, 4, 2, communication=1, weight_share=1, parameters=2)
    assert lower_bound(heavy, v_shape(4), 12, 8) == lower_bound(costs, v_shape(4), 12, 4)


def test_arguments_are_refused():
    for arguments, words in (
        ((Costs(), (0, 2), 2, 2), "ranks \\[1\\] hold no stage"),
        ((Costs(), (0, 1), 0, 2), "microbatches = 0"),
        ((Costs(), (0, 1), 2, 0), "cap is 0, expected a finite number above 0"),
        ((Costs(), (0, 1), 2, [1, 1, 1]), "cap has 3 numbers, expected 2"),
        (
            (Costs(parameters=5), (0, 1), 2, 5),
            "cap is 5, but one microbatch and the parameters of rank 0 take 6",
        ),
        ((Costs(), (0, 1), 2, 2, "time"), "objective is 'time'"),
        ((Costs(forward=[1]), (0, 1), 2, 2), "forward has 1 numbers, expected 2"),
    ):
        with pytest.raises(ValueError, match=words):
            lower_bound(*arguments)


def test_it_is_quick():
    costs = Costs(9.261, 9.043, 4.6685, communication=0.601, weight_share=1)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        lower_bound(costs, v_shape(64, 2), 256, 96)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.1 * busy()
