"""Plans: proved, within their memory, between the bound and every builder, the same in every process."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from fractions import Fraction
from operator import add
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from ppfunc.parallel import loop, v_shape
from ppfunc.schedule import BUILDERS, Costs, check, lower_bound, place_communication, plan, simulate
from ppfunc.schedule.planner.problem import problem_of
from ppfunc.schedule.planner.replay import Manner, directions, evaluate, fits, replay, schedule_of
from ppfunc.schedule.planner.search import given_orders, spaced_orders
from tests.clock import busy

REAL = {"forward": 18.522, "backward_input": 18.086, "backward_weight": 9.337}
QUICK = 0.02


def real(chunks: int, **more: object) -> Costs:
    """The times per rank that the zero-bubble papers profiled, cut into chunks."""
    return Costs(
        **{name: time / chunks for name, time in REAL.items()}, communication=0.601, weight_share=1, **more
    )


@st.composite
def problems(draw):
    """Costs, placement, microbatches, cap and objective of a small problem that can be solved."""
    ranks, m = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    place = draw(
        st.sampled_from(
            [
                loop(ranks),
                loop(ranks, 2),
                v_shape(ranks, 2),
                v_shape(ranks, 3),
                (*loop(ranks), 0),
                (*v_shape(ranks, 2), ranks - 1),
            ]
        )
    )
    times = st.one_of(
        st.integers(0, 9), st.lists(st.integers(0, 9), min_size=len(place), max_size=len(place))
    )
    sizes = st.lists(st.integers(1, 3), min_size=len(place), max_size=len(place))
    share = draw(st.sampled_from([0, Fraction(2, 5), 1]))
    parameters = draw(st.integers(0, 2))
    costs = Costs(
        *(draw(times) for _ in range(3)),
        communication=draw(times),
        activation=draw(sizes),
        weight_share=share,
        parameters=parameters,
    )
    needs = [
        sum(costs.activation[s] + parameters for s in range(len(place)) if place[s] == r)
        for r in range(ranks)
    ]
    return costs, place, m, max(needs) + draw(st.integers(0, 9)), draw(st.sampled_from(["span", "makespan"]))


@given(problems())
def test_a_plan_is_proved_within_its_cap_and_never_below_the_bound(problem):
    costs, place, m, cap, objective = problem
    found = plan(max(place) + 1, m, costs, cap=cap, placement=place, objective=objective, effort=QUICK)
    check(place_communication(found.schedule))
    timeline = simulate(found.schedule, costs)
    assert found.timeline == timeline and found.value == getattr(timeline, objective)
    held = [
        sum(costs.of("parameters", s) for s in found.schedule.stages_of(r))
        for r in range(found.schedule.ranks)
    ]
    assert found.memory == tuple(map(add, timeline.peak_activations, held)) and max(found.memory) <= cap
    assert found.bound == lower_bound(costs, place, m, cap, objective)
    assert found.value >= found.bound.value
    assert found.gap == pytest.approx(float(found.value / found.bound.value) - 1 if found.bound.value else 0)
    assert (
        found.schedule
        == plan(
            max(place) + 1, m, costs, cap=cap, placement=place, objective=objective, effort=QUICK
        ).schedule
    )


@given(
    st.sampled_from(sorted(BUILDERS)),
    st.integers(1, 4),
    st.integers(1, 8),
    st.sampled_from(["span", "makespan"]),
    st.data(),
)
def test_never_longer_than_a_builder_in_its_own_memory(name, ranks, m, objective, data):
    try:
        schedule = BUILDERS[name](ranks, m)
    except ValueError:
        return
    if schedule.forward_only or len(schedule.flows) > 1 or schedule.ranks < ranks:
        return
    times = st.lists(st.integers(0, 9), min_size=schedule.stages, max_size=schedule.stages)
    costs = Costs(
        *(data.draw(times) for _ in range(3)),
        communication=data.draw(times),
        weight_share=data.draw(st.sampled_from([0, 0.37, 1])),
    )
    timeline = simulate(schedule, costs)
    cap = [max(1, peak) for peak in timeline.peak_activations]
    found = plan(ranks, m, costs, cap=cap, placement=schedule.placement, objective=objective, effort=QUICK)
    assert found.value <= getattr(timeline, objective)


def test_a_cap_that_is_a_rounded_sum_has_room_for_the_sum():
    """1 + 3 x 0.37 is 2.11 to the last bit of a float, and a little less than the exact sum."""
    schedule = BUILDERS["zero_bubble"](4, 4)
    costs = Costs([0, 0, 0, 0], [0, 0, 2, 2], [2, 0, 0, 1], weight_share=0.37)
    timeline = simulate(schedule, costs)
    cap = [max(1, peak) for peak in timeline.peak_activations]
    assert lower_bound(costs, schedule.placement, 4, cap).value <= timeline.span
    assert plan(4, 4, costs, cap=cap, placement=schedule.placement, effort=QUICK).value <= timeline.span


@given(problems(), st.sampled_from([0, 0.6, 2]), st.booleans(), st.data())
def test_replays_keep_the_cap_in_both_directions_of_time(problem, patience, lazy, data):
    p = problem_of(*problem)
    forwards, backwards = directions(p)
    items = st.integers(0, len(forwards.duration) - 1)
    hold = data.draw(st.dictionaries(items, st.floats(0, 20), max_size=5))
    order = data.draw(st.sampled_from([given.order for given in given_orders(p, spaced_orders(p))]))
    for _ in range(2):
        late = replay(backwards, tuple(word[::-1] for word in order), Manner(patience))
        order = tuple(word[::-1] for word in late.order)
        assert fits(forwards, order) and evaluate(forwards, order).value <= late.value * (1 + 1e-9)
        order = replay(forwards, order, Manner(patience, lazy, hold)).order
        assert fits(forwards, order) and evaluate(forwards, order) is not None
    check(schedule_of(p, order))


@given(problems())
@settings(max_examples=15)
def test_a_microbatch_that_repeats_never_deadlocks_and_one_distance_fits_in_any_cap(problem):
    p = problem_of(*problem)
    forwards, _ = directions(p)
    orders = [order for _, order in spaced_orders(p)]
    assert all(evaluate(forwards, order) is not None for order in orders)
    assert fits(forwards, orders[-1])


def test_a_plan_where_nothing_takes_time_fits_in_its_cap():
    found = plan(2, 4, Costs(0, 0, 0, weight_share=1), cap=2, placement="v", chunks=2)
    assert found.value == 0 and max(found.memory) == 2


def test_equal_costs_are_planned_optimally():
    for p, m, cap in ((4, 8, 4), (8, 24, 8), (8, 24, 15)):
        for costs in (Costs(weight_share=1), Costs(9, 9, 5, communication=1, weight_share=1)):
            assert plan(p, m, costs, cap=cap, placement="loop", chunks=1, objective="span").optimal
    for p, cap in ((4, 4), (4, 6), (8, 8), (8, 12)):
        assert plan(p, 24, Costs(weight_share=1), cap=cap, placement="v", objective="span").optimal


def test_profiled_costs_on_a_v_are_planned_optimally():
    for cap in (10, 12):
        found = plan(8, 24, real(2), cap=cap, placement="v", objective="span")
        assert found.optimal
        assert found.timeline.span_bubble == pytest.approx({10: 0.1671, 12: 0.1371}[cap], abs=5e-5)


def test_profiled_costs_with_a_share_are_planned_below_the_published_bubble():
    """Of 0.0039. With one patience for both starts the search ended with the order of a builder, 0.0036."""
    costs = replace(real(1), weight_share=0.3664)
    found = plan(8, 32, costs, cap=16, placement="loop", chunks=1, objective="span")
    assert found.timeline.span_bubble < 0.0031


def test_more_chunks_are_better_at_equal_memory():
    """Numbers for all stages are those of a rank with one stage, so that the cap is the same for any number
    of chunks.
    """
    found = plan(4, 12, real(1), cap=4, objective="span", effort=0.5)
    alone = plan(4, 12, real(1), cap=4, placement="loop", chunks=1, objective="span", effort=0.5)
    assert found.value < alone.value and max(found.memory) <= 4
    stages = found.schedule.stages
    assert found.costs.of("forward", 0) == pytest.approx(18.522 * 4 / stages)


def test_a_cap_in_bytes():
    gib = 2**30
    costs = Costs(
        0.010,
        0.011,
        0.009,
        activation=[3 * gib] * 4,
        weight_share=0.4,
        parameters=[2 * gib, gib, gib, 2 * gib],
    )
    found = plan(4, 12, costs, cap=14 * gib, objective="makespan", effort=0.1)
    assert max(found.memory) <= 14 * gib
    assert found.value < plan(4, 12, costs, cap=8 * gib, objective="makespan", effort=0.1).value


def test_another_process_finds_the_same():
    code = (
        "from ppfunc.schedule import Costs, plan; print(plan(4, 8, Costs(18.5, 18.1, 9.3, communication=0.6,"
        " weight_share=1), cap=3, objective='span', effort=0.05).schedule.digest)"
    )
    digests = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    ours = plan(
        4, 8, Costs(18.5, 18.1, 9.3, communication=0.6, weight_share=1), cap=3, objective="span", effort=0.05
    )
    assert digests == {f"{ours.schedule.digest}\n"}


def test_exact_times_are_planned_exactly_in_any_unit():
    whole, parts = (Costs(3 * u, 4 * u, 2 * u, communication=u, weight_share=1) for u in (1, Fraction(1, 7)))
    for objective in ("span", "makespan"):
        options = {"cap": 4, "placement": "v", "objective": objective, "effort": 0.05}
        one, seventh = plan(3, 6, whole, **options), plan(3, 6, parts, **options)
        assert one.schedule == seventh.schedule
        assert (seventh.value, seventh.bound.value) == (Fraction(one.value, 7), Fraction(one.bound.value, 7))


def test_of_many_microbatches_and_several_placements_none_is_shorter_than_its_bound():
    seen = []
    options = {"cap": 3, "objective": "span", "effort": 0.02, "placement": "any", "chunks": range(1, 3)}
    found = plan(3, 42, real(1), **options, progress=lambda *told: seen.append(told))
    assert seen and all(value >= bound * (1 - 1e-9) for _, value, bound in seen)
    assert found.schedule.microbatches == 42
    assert found.value <= simulate(BUILDERS["zero_bubble"](3, 42, cap=3, costs=real(1)), real(1)).span


def test_ranks_with_many_different_stages_are_planned_in_time():
    draw = Random(1)
    times = [[draw.uniform(0.5, 1.5) for _ in range(32)] for _ in range(3)]
    start = time.process_time()
    plan(4, 12, Costs(*times, weight_share=1), cap=22, placement="v", chunks=8, objective="span", effort=0.1)
    assert time.process_time() - start < 10 * busy()


def test_progress_is_told_and_can_stop_the_search():
    seen = []

    def progress(share, value, bound):
        seen.append((share, value, bound))
        return len(seen) == 5

    found = plan(8, 24, real(2), cap=8, placement="v", objective="span", progress=progress)
    assert len(seen) == 5 and not found.optimal
    assert seen[-1][1] >= found.value >= seen[-1][2] == found.bound.value


def test_arguments_are_refused():
    for arguments, options, words in (
        ((0, 2), {}, "ranks = 0"),
        ((2, 0), {}, "microbatches = 0"),
        ((2, 2, {"forward": 1}), {}, "expected Costs"),
        ((2, 2, Costs(forward=[])), {}, "given for 0 stages, expected a multiple of 2"),
        ((2, 2), {"effort": 0}, "effort is 0"),
        ((2, 2), {"placement": None}, "placement is None"),
        ((2, 2), {"chunks": 1.5}, "chunks = 1.5"),
        ((2, 2), {"cap": "4"}, "cap is '4', expected a finite number above 0"),
        ((2, 2), {"cap": float("nan")}, "cap is nan, expected a finite number above 0"),
        ((2, 2), {"cap": True}, "cap is True, expected a finite number above 0"),
        ((2, 2), {"placement": "w"}, "placement is 'w'"),
        ((2, 2), {"placement": (0, 1, 2)}, "placement has 3 ranks, expected 2"),
        ((2, 2), {"placement": (0, 1), "chunks": 1}, "leave chunks out"),
        ((2, 2), {"chunks": range(0)}, "chunks names no number"),
        ((2, 2), {"chunks": 0}, "chunks = 0"),
        ((2, 2), {"cap": 0.5}, "one microbatch and the parameters of rank 0 take 1"),
        ((2, 2), {"objective": "time"}, "objective is 'time'"),
        ((2, 2, Costs(overlapped=2)), {}, "overlapped is given"),
        ((2, 2, Costs(backward=2)), {}, "backward is given"),
        ((2, 2, Costs(forward=[1, 2, 3])), {}, "given for 3 stages, expected a multiple of 2"),
        (
            (2, 2, Costs(forward=[1, 2])),
            {"chunks": range(1, 3)},
            "given per stage, but chunks allows several",
        ),
    ):
        with pytest.raises(TypeError if "Costs" in words else ValueError, match=words):
            plan(*arguments, **options)


def test_it_says_what_it_is():
    found = plan(2, 4, Costs(weight_share=1), cap=2, placement="loop", objective="span")
    assert repr(found) == "Plan(loop of 1, span 13, bound 13 (work, rank 0), optimal, bubble 7.7%, memory 2)"
    found = plan(2, 4, Costs(*[1e-3] * 3, weight_share=1, seconds=True), cap=2, placement="loop")
    assert "makespan 13 ms, bound 13 ms (" in str(found)
