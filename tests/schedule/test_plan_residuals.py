"""Plans whose residuals stay, move or are computed again: proved, and never longer than any one policy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from ppfunc.schedule import (
    Costs,
    Op,
    check,
    gpipe,
    insert_offloads,
    insert_recomputes,
    lower_bound,
    place_communication,
    plan,
    simulate,
    split_backward,
)
from ppfunc.schedule.planner.problem import bound_of, problem_of
from ppfunc.schedule.planner.replay import (
    Manner,
    choices_of,
    directions,
    evaluate,
    fits,
    order_of,
    replay,
    schedule_of,
)
from ppfunc.schedule.planner.search import given_orders, residual_orders, spaced_orders
from tests.schedule.exhaustive import FIELDS, least, problem
from tests.schedule.test_plan import problems

LINES = (Path(__file__).parent / "optima_residuals.jsonl").read_text().splitlines()
TABLE = [json.loads(line) for line in LINES if not line.startswith("#")]
SHARE = Costs(18.522, 18.086, 9.337, communication=0.601, weight_share=1, checkpoint=1 / 16)


@st.composite
def flexible(draw):
    """A problem of :func:`problems` with ways for residuals, and its costs."""
    costs, *rest = draw(problems())
    stages = len(rest[0])
    times = st.lists(st.one_of(st.none(), st.integers(0, 9)), min_size=stages, max_size=stages)
    recompute, offload = draw(st.one_of(st.none(), times)), draw(st.one_of(st.none(), times))
    recompute = recompute or ([2] * stages if offload is None else None)
    fetch = draw(st.one_of(st.none(), st.integers(0, 9)))
    return replace(
        costs, recompute=recompute, offload=offload, fetch=fetch, checkpoint=draw(st.sampled_from([0, 0.5]))
    ), *rest


def test_the_bound_is_never_above_the_optimum_and_a_plan_never_below_it():
    assert len(TABLE) >= 90
    met = near = 0
    for row in TABLE:
        bound = bound_of(problem(row))
        assert bound.value <= row["optimum"], row
        met += bound.value == row["optimum"]
    assert met > 0.5 * len(TABLE)
    for row in TABLE[::3]:
        costs = Costs(**{name: row[name] for name in FIELDS})
        found = plan(
            max(row["placement"]) + 1, row["microbatches"], costs, cap=row["cap"],
            placement=row["placement"], objective=row["objective"], effort=0.001,
        )  # fmt: skip
        assert row["optimum"] <= found.value, row
        near += found.value == row["optimum"]
    assert near > 0.9 * len(TABLE[::3])


@pytest.mark.parametrize("number", range(0, 12, 3))
def test_the_stored_optima_are_those_of_all_schedules(number):
    assert least(problem(TABLE[number])) == TABLE[number]["optimum"]


@given(flexible())
@settings(max_examples=15)
def test_a_plan_is_proved_within_its_cap_and_never_longer_than_one_policy(instance):
    costs, place, m, cap, objective = instance
    options = {"placement": place, "objective": objective, "effort": 0.01}
    found = plan(max(place) + 1, m, costs, cap=cap, **options)
    check(found.schedule)
    check(place_communication(found.schedule))
    assert max(found.memory) <= cap * (1 + 1e-9)
    assert found.bound.value <= found.value * (1 + 1e-9)
    still = replace(costs, recompute=None, offload=None, fetch=None)
    stages = range(len(place))
    again, moving = ([s for s in stages if costs.of(n, s) is not None] for n in ("recompute", "offload"))
    for limit in (cap, None):
        kept = plan(max(place) + 1, m, still, cap=limit, **options).schedule
        for one in (
            kept,
            insert_recomputes(kept, again),
            *(insert_offloads(kept, moving, lookahead=n) for n in (0, 1)),
        ):
            timeline = simulate(one, costs)
            taken = [sum(costs.of("parameters", s) for s in one.stages_of(r)) for r in range(one.ranks)]
            if all(a + b <= cap for a, b in zip(timeline.peak_activations, taken, strict=True)):
                assert found.value <= getattr(timeline, objective) * (1 + 1e-9)


@given(flexible(), st.sampled_from([0, 0.6, 2]), st.booleans(), st.integers(0, 99))
def test_replays_of_chosen_ways_keep_the_cap_and_are_timed_as_simulated(instance, patience, lazy, seed):
    costs, place, m, cap, objective = instance
    p, draw = (
        problem(dict(placement=place, microbatches=m, cap=cap, objective=objective, **vars(costs))),
        Random(seed),
    )
    order = next(given.order for given in given_orders(p, spaced_orders(p)))
    orders = [order for _, order in residual_orders(p, schedule_of(p, order))]
    for _ in range(3):
        order = draw.choice(orders)
        forwards, backwards = directions(p, choices_of(p, order))
        if not fits(forwards, order) or not evaluate(forwards, order):
            continue
        late = replay(backwards, tuple(word[::-1] for word in order), Manner(patience))
        order = tuple(word[::-1] for word in late.order)
        assert fits(forwards, order)
        value, order = replay(forwards, order, Manner(patience, lazy))
        assert objective == "span" or evaluate(forwards, order).value <= value * (1 + 1e-9)
        assert fits(forwards, order)
        schedule = schedule_of(p, order)
        check(schedule)
        assert order_of(schedule) == order
        timeline = simulate(schedule, costs)
        assert getattr(timeline, objective) == pytest.approx(
            float(p.time_of(evaluate(forwards, order).value)), abs=1e-9
        )


def test_a_replay_carries_one_copy_after_the_other():
    p = problem_of(Costs(1, 1, 1, offload=5), (0,), 3, 3, "makespan")
    order = order_of(insert_offloads(split_backward(gpipe(1, 3)), lookahead=0))
    forwards, _ = directions(p, choices_of(p, order))
    replayed = replay(forwards, order)
    assert replayed.value == evaluate(forwards, replayed.order).value >= 3 * 5


def test_a_plan_recomputes_and_moves_where_memory_is_short():
    options = {"placement": "v", "objective": "span", "effort": 0.1}
    stage = SHARE.per_rank(plan(4, 12, SHARE, effort=0.01, placement="v").schedule)
    kept = plan(4, 12, stage, cap=2, **options)
    link = replace(stage, offload=stage.forward)
    assert {Op.OFFLOAD, Op.FETCH} <= (moved := plan(4, 12, link, cap=2, **options)).schedule.ops
    again = plan(4, 12, replace(stage, recompute=stage.forward), cap=2, **options)
    assert Op.RECOMPUTE in again.schedule.ops
    assert moved.value < 0.97 * kept.value and again.value < kept.value
    assert plan(4, 12, link, **options).schedule.ops == {Op.F, Op.I, Op.W}  # nothing moves for nothing


def test_a_faster_link_never_raises_the_bound_and_without_a_cap_it_is_that_of_what_stays():
    values = [lower_bound(replace(SHARE, offload=t), range(4), 12, 2).value for t in (100, 60, 40, 20, 0)]
    assert values == sorted(values, reverse=True)
    assert values[0] > values[-1] == lower_bound(SHARE, range(4), 12).value
    assert values[0] <= lower_bound(SHARE, range(4), 12, 2).value
