"""Times and memory on paper: the rule, the published figures, and what is exact."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from ppfunc.schedule import (
    BUILDERS,
    Costs,
    Instruction,
    Op,
    ScheduleError,
    append_tail,
    dualpipe,
    gpipe,
    inference,
    insert_loads,
    insert_offloads,
    insert_unshards,
    interleaved_1f1b,
    one_f_one_b,
    place_communication,
    reduce_early,
    remove_communication,
    simulate,
    split_backward,
    zb_h1,
)
from ppfunc.schedule.dataflow import Dataflow
from ppfunc.schedule.instruction import COMPUTE
from ppfunc.schedule.proof.timeline import timeline_of

numbers = st.fractions(0, 5, max_denominator=6)


def built(name, p, m):
    try:
        return remove_communication(BUILDERS[name](p, m))
    except ValueError:
        return None


any_schedule = st.builds(
    built, st.sampled_from(sorted(BUILDERS)), st.integers(1, 5), st.integers(1, 10)
).filter(bool)


@given(any_schedule, st.data())
def test_every_instruction_starts_as_soon_as_it_can(schedule, data):
    """The rule itself, instruction by instruction, against exact times."""
    stages = st.lists(numbers, min_size=schedule.stages, max_size=schedule.stages)
    costs = Costs(
        *(data.draw(stages) for _ in range(3)), communication=data.draw(stages), overlapped=data.draw(numbers)
    )
    timeline = simulate(schedule, costs)
    flow = Dataflow(schedule)
    rows = [[i for i in schedule.instructions(r)] for r in range(schedule.ranks)]
    done = {
        v: end
        for r, row in enumerate(rows)
        for i, end in zip(row, timeline.ends[r], strict=True)
        if i.op in COMPUTE
        for v in flow.products(i)
    }
    for rank, row in enumerate(rows):
        free = 0
        for instruction, start, end in zip(row, timeline.starts[rank], timeline.ends[rank], strict=True):
            if instruction.op not in COMPUTE:
                assert start == end == free
                continue
            arrivals = [
                done[v] + (costs.communication[a] if schedule.placement[a] != rank else 0)
                for v, a in flow.consumed(instruction)
            ]
            assert start == max([free, *arrivals])
            assert end - start == duration(costs, instruction)
            free = end
    assert timeline.makespan == max(ends[-1] for ends in timeline.ends)
    assert type(timeline.makespan) is not float


def duration(costs, instruction):
    if instruction.parts:
        return costs.overlapped
    per_stage = {Op.F: [costs.forward], Op.I: [costs.backward_input], Op.W: [costs.backward_weight]}
    return sum(
        c[instruction.stage]
        for c in per_stage.get(instruction.op, [costs.backward_input, costs.backward_weight])
    )


@given(any_schedule, numbers)
def test_communications_change_no_time(schedule, latency):
    costs = Costs(communication=latency)
    bare, lowered = simulate(schedule, costs), simulate(place_communication(schedule), costs)
    fields = ("makespan", "span", "bubble", "span_bubble", "idle", "peak_activations")
    assert [getattr(bare, f) for f in fields] == [getattr(lowered, f) for f in fields]


def test_a_message_lasts_from_its_producer_until_it_is_there():
    lowered = place_communication(one_f_one_b(2, 1))
    timeline = simulate(lowered, Costs(communication=Fraction(1, 2)))
    at = {
        str(i): (a, b)
        for r in range(2)
        for i, a, b in zip(lowered.instructions(r), timeline.starts[r], timeline.ends[r], strict=True)
    }
    assert at["0SEND_F0"] == at["1RECV_F0"] == (1, Fraction(3, 2))
    assert at["1F0"] == (Fraction(3, 2), Fraction(5, 2))
    assert at["1SEND_B0"] == at["0RECV_B0"] == (Fraction(9, 2), 5)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (4, 4), (4, 8), (8, 24)])
def test_the_bubble_of_one_f_one_b(p, m):
    timeline = simulate(one_f_one_b(p, m), Costs(forward=2, backward=5))
    assert timeline.idle == ((p - 1) * 7,) * p
    assert timeline.peak_activations == tuple(min(p - r, m) for r in range(p))
    assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))


def test_dualpipe():
    timeline = simulate(dualpipe(8, 20), Costs(forward=1, backward=2, backward_weight=1, overlapped=3))
    assert timeline.makespan == 66
    assert timeline.idle == (6,) * 8 == ((8 // 2 - 1) * (3 + 2 - 3),) * 8
    assert timeline.peak_activations == (9,) * 8


# p, m, F, I, W, communication, published rate: Zero Bubble Pipeline Parallelism, table of 1F1B.
def test_the_published_bubble_rate():
    costs = Costs(18.522, 18.086, 9.337, communication=0.601)
    timeline = simulate(one_f_one_b(8, 24), costs)
    assert round(timeline.span_bubble, 4) == 0.2431
    exact = simulate(
        one_f_one_b(8, 24),
        Costs(*map(Fraction, ("18.522", "18.086", "9.337")), communication=Fraction("0.601")),
    )
    assert float(exact.span_bubble) == pytest.approx(timeline.span_bubble, rel=1e-13)


def test_span_and_makespan():
    timeline = simulate(inference(ranks=4, microbatches=3), Costs(forward=2))
    assert (timeline.makespan, timeline.span) == (12, 6)
    assert (timeline.bubble, timeline.span_bubble) == (0.5, 0)


def test_memory_of_weight_gradients():
    schedule = split_backward(gpipe(1, 4))
    rows = [
        *[s for s in schedule.programs[0] if s[0].op is not Op.W],
        *[s for s in schedule.programs[0] if s[0].op is Op.W],
    ]
    late = replace(schedule, programs=(tuple(rows),))
    assert simulate(late).peak_activations == (4,)
    one_by_one = zb_h1(4, 8)
    assert simulate(one_by_one).peak_activations == (4, 3, 2, 1)
    assert simulate(one_by_one, Costs(weight_share=1)).peak_activations == (4, 4, 4, 4)
    half = simulate(one_by_one, Costs(activation=[4, 3, 2, 10], weight_share=Fraction(1, 2)))
    assert half.peak_activations == (16, Fraction(21, 2), 6, 25)
    assert simulate(one_by_one, Costs(weight_share=0.1)).peak_activations[3] == 1 + 3 * 0.1


def test_memory_of_what_is_offloaded_and_of_inference():
    assert simulate(insert_offloads(gpipe(2, 6))).peak_activations == (3, 3)
    assert simulate(insert_offloads(gpipe(2, 6), lookahead=0)).peak_activations == (1, 1)
    assert simulate(inference(2, 6)).peak_activations == (1, 1)


def test_costs_per_stage():
    schedule = one_f_one_b(2, 1)
    expected = simulate(schedule, Costs(forward=[1, 5], backward=(2, 2))).makespan
    assert expected == 1 + 5 + 2 + 2
    assert simulate(schedule, Costs(forward={1: 5}, backward=2)).makespan == expected
    assert simulate(schedule, Costs(communication={0: 10, 1: 0})).makespan == 6 + 10


def test_messages_take_latency_and_bytes_over_bandwidth():
    costs = Costs(communication=1, bytes=6, bandwidth=4)
    assert simulate(one_f_one_b(2, 1), costs).makespan == 6 + 2 * Fraction(5, 2)
    assert simulate(one_f_one_b(2, 1), Costs(bytes=6.0, bandwidth=4)).makespan == 9.0
    assert simulate(one_f_one_b(2, 1), Costs(bytes=6)).makespan == 6


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ({"forward": -1}, "forward is -1, expected a finite number"),
        ({"forward": float("nan")}, "finite"),
        ({"backward": "2"}, "expected a number"),
        ({"forward": None}, "expected a number"),
        ({"weight_share": 2}, "at most 1"),
        ({"bandwidth": 0}, "bandwidth is 0"),
        ({"forward": [1, -2]}, "forward is -2"),
        ({"forward": [1, 2, 3]}, "forward has 3 numbers, expected 2"),
        ({"forward": {2: 1}}, "names stage 2"),
    ],
)
def test_costs_that_make_no_sense(costs, words):
    with pytest.raises(ValueError, match=words):
        simulate(one_f_one_b(2, 2), Costs(**costs))


def test_measured_times_give_the_same_figures():
    schedule = append_tail(insert_loads(place_communication(one_f_one_b(3, 5))))
    timeline = simulate(schedule, Costs(backward=3))
    assert timeline_of(schedule, timeline.starts, timeline.ends) == timeline
    costs = Costs(2, 1, 4, 5, communication=[1, 2, 0], reduce_grad=[1, 2, 3], step=2)
    timeline = simulate(schedule, costs)
    measured = timeline.costs()
    assert (measured.of("reduce_grad", 2), measured.of("step", 0), measured.of("unshard", 1)) == (3, 2, 0)
    assert simulate(schedule, measured).ends == timeline.ends
    with pytest.raises(ValueError, match="rank 0 has"):
        timeline_of(schedule, [[]] * 3, [[]] * 3)
    for wrong in (-1, float("nan")):
        ends = [[*timeline.ends[0][:-1], wrong], *timeline.ends[1:]]
        with pytest.raises(
            ValueError, match=rf"ends\[0\]\[\d+\]: got {wrong}, expected at least the start of"
        ):
            timeline_of(schedule, timeline.starts, ends)


def test_what_is_no_schedule_is_refused():
    with pytest.raises(ScheduleError, match="of type str, expected a Schedule"):
        simulate("1f1b")


def test_an_order_that_cannot_run_is_refused():
    schedule = gpipe(2, 2)
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(replace(schedule, programs=(schedule.programs[0][::-1], schedule.programs[1])))
    without = replace(schedule, programs=(schedule.programs[0][1:], schedule.programs[1]))
    with pytest.raises(ScheduleError, match="the output of stage 0 for microbatch 0, which no rank computes"):
        simulate(without)


def test_nothing_takes_no_time():
    timeline = simulate(one_f_one_b(2, 2), Costs(0, 0, 0))
    assert (timeline.makespan, timeline.bubble, timeline.span_bubble) == (0, 0, 0)


def test_a_reduction_hides_behind_the_backwards_of_other_stages():
    schedule = append_tail(interleaved_1f1b(2, 4))
    costs = Costs(reduce_grad=3, step=1)
    late, early = simulate(schedule, costs), simulate(reduce_early(schedule), costs)
    assert (late.makespan, early.makespan) == (34, 32)
    assert late.idle == (34 - 26,) * 2  # 24 of compute and 2 of optimizer steps


def test_a_rank_that_waits_for_ever_is_found_behind_a_step():
    schedule = append_tail(gpipe(2, 1))
    wrong = replace(schedule, programs=(schedule.programs[0][::-1], schedule.programs[1][1:]))
    with pytest.raises(
        ScheduleError,
        match=r"rank 0, step 1, place 0, 0B0: deadlock: .* computes only at step 2, place 0 \(0F0\)",
    ):
        simulate(wrong)


def test_what_takes_no_time_stands_where_its_rank_is_free():
    schedule = append_tail(insert_unshards(one_f_one_b(1, 1)), step=False)
    (program,) = schedule.programs
    behind = (*program[:-1], (*program[-1], Instruction(Op.RESHARD, 0)))
    moved = replace(
        schedule,
        programs=(tuple(tuple(i for i in s if i.op is not Op.RESHARD) for s in behind[:-1]) + behind[-1:],),
    )
    timeline = simulate(moved, Costs(unshard=2, reduce_grad=5))
    assert [str(i) for i in moved.instructions(0)] == ["0UNSHARD", "0F0", "0B0", "0REDUCE_GRAD", "0RESHARD"]
    assert (timeline.starts[0], timeline.ends[0]) == ((0, 2, 3, 5, 5), (2, 3, 5, 10, 5))


@pytest.mark.parametrize("builder", [gpipe, one_f_one_b, zb_h1])
def test_the_costs_of_a_timeline_give_that_timeline_again(builder):
    schedule = place_communication(builder(4, 6))
    costs = Costs(
        forward=[1, 2, 1, 3], backward_input=[2, 1, 1, 2], backward_weight=[1, 1, 2, 1],
        backward=[4, 2, 3, 3], communication=1,
    )  # fmt: skip
    timeline = simulate(schedule, costs)
    again = simulate(schedule, timeline.costs())
    assert (again.starts, again.ends) == (timeline.starts, timeline.ends)
