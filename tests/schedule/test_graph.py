"""Graphs of stages in order on their ranks: any flows, encoders in bubbles, output layers in parts."""

import random
from dataclasses import replace
from itertools import chain, pairwise, product

import pytest
from hypothesis import given, strategies as st

import ppfunc as pp
from ppfunc.schedule import (
    BUILDERS,
    Costs,
    Flow,
    Op,
    ScheduleError,
    append_tail,
    arrange,
    check,
    insert_recomputes,
    interleaved_1f1b,
    one_f_one_b,
    place_communication,
    seq1f1b,
    simulate,
    spread,
    with_parts,
    zb_h1,
    zbv,
)
from tests.graphs import random_graph

BACKWARDS = (Op.B, Op.I)


def makespan(schedule, costs):
    """Time a schedule by another way than `simulate`: passes over all instructions until nothing moves."""
    time = {}
    jobs = [[(i.op, i.stage, i.microbatch) for i in schedule.instructions(r)] for r in range(schedule.ranks)]
    there = set(chain(*jobs))

    def needs(op, stage, m):
        flow = next(f for f in schedule.flows if m in f.microbatches and stage in f.stages)
        edges = [*flow.pairs, *(s for s in schedule.skips if {*s} <= {*flow.stages})]
        if op is Op.F:
            return [(Op.F, a, m) for a, b in edges if b == stage]
        if op is Op.W:
            return [(Op.I, stage, m)]
        after = [(kind, b, m) for a, b in edges if a == stage for kind in BACKWARDS]
        return [(Op.F, stage, m), *(job for job in after if job in there)]

    while len(time) < len(there):
        before = len(time)
        for row in jobs:
            free = 0
            for job in row:
                if job not in time:
                    if not all(need in time for need in needs(*job)):
                        break
                    arrivals = [
                        time[need]
                        + (
                            costs.message_of(need[1])
                            if schedule.placement[need[1]] != schedule.placement[job[1]]
                            else 0
                        )
                        for need in needs(*job)
                    ]
                    time[job] = max([free, *arrivals]) + costs.time_of(*job[:2])
                free = time[job]
        assert len(time) > before, "the ranks wait for each other"
    return max(time.values())


def proved(schedule, costs=None):
    """Prove a schedule, with its messages too, and return its time, which both ways find."""
    check(schedule)
    check(place_communication(schedule))
    time = simulate(schedule, costs).makespan
    assert time == makespan(schedule, costs or Costs())
    return time


def work(schedule, costs):
    """The time of the busiest rank."""
    return max(
        sum(costs.time_of(i.op, i.stage) for i in schedule.instructions(rank))
        for rank in range(schedule.ranks)
    )


@st.composite
def graphs(draw):
    """A placement, flows that share stages, costs, and whether backwards are apart."""
    ranks, stages = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    placement = [*range(ranks)][:stages] + draw(
        st.lists(st.integers(0, ranks - 1), min_size=stages, max_size=stages)
    )
    placement = draw(st.permutations(placement[:stages]))
    all_edges = [
        (a, b) for b in range(1, stages) for a in range(b) if a == b - 1 or draw(st.integers(0, 3)) == 0
    ]
    skips = [edge for edge in all_edges if edge[1] > edge[0] + 1 and draw(st.booleans())]
    edges = tuple(edge for edge in all_edges if edge not in skips)
    chained = edges == tuple(pairwise(range(stages)))
    microbatches = draw(st.integers(1, 6))
    flows = [Flow(tuple(range(stages)), range(microbatches), None if chained else edges)]
    number = st.integers(0, 5)
    sizes = [draw(st.lists(number, min_size=stages, max_size=stages)) for _ in range(5)]
    names = ("forward", "backward_input", "backward_weight", "communication", "activation")
    costs = Costs(**dict(zip(names, sizes, strict=True)), weight_share=draw(st.sampled_from([0, 0.5, 1])))
    return placement, flows, skips, costs, draw(st.booleans())


@given(graphs(), st.sampled_from([None, 0, 1, 3]))
def test_any_graph_is_put_in_order(graph, more):
    placement, flows, skips, costs, apart = graph
    if 1 + max(placement) > len({*placement}):
        placement = [sorted({*placement}).index(rank) for rank in placement]
    ranks = 1 + max(placement)
    need = [
        sum(costs.of("activation", s) for s, rank in enumerate(placement) if rank == r) for r in range(ranks)
    ]
    cap = None if more is None else [most + more for most in need]
    schedule = arrange(placement, flows, skips=skips, apart=apart, cap=cap, costs=costs)
    proved(schedule, costs)
    assert schedule == arrange(placement, flows, skips=skips, apart=apart, cap=cap, costs=costs)
    if cap is not None:
        peaks = simulate(schedule, costs).peak_activations
        assert all(peak <= most for peak, most in zip(peaks, cap, strict=True))


@given(st.integers(1, 6), st.integers(1, 12))
def test_a_chain_is_1f1b(ranks, microbatches):
    """The block of a chain is known: with no bubble in its steady state, and the least memory for that."""
    made = arrange([*range(ranks)], [Flow(tuple(range(ranks)), range(microbatches))])
    assert made.programs == one_f_one_b(ranks, microbatches).programs


@given(st.integers(0, 2**32), st.sampled_from([None, 0, 2]), st.booleans())
def test_any_flows_are_put_in_order(seed, more, apart):
    """Several graphs that share stages; and with an encoder and an output layer in parts beside."""
    drawn = random_graph(random.Random(seed))
    graph = {"skips": drawn.skips, "replicas": drawn.replicas, "apart": apart}
    free = arrange(drawn.placement, drawn.flows, **graph)
    proved(free)
    need = [
        max(sum(free.placement[s] == rank for s in flow.stages) for flow in free.flows)
        for rank in range(free.ranks)
    ]
    cap = [most + (more or 0) for most in need]
    tight = arrange(drawn.placement, drawn.flows, cap=cap, **graph)
    proved(tight)
    costs = Costs(weight_share=1)
    assert all(a <= b for a, b in zip(simulate(tight, costs).peak_activations, cap, strict=True))
    bases = [drawn] if drawn.ops <= {Op.F, Op.B, Op.I, Op.W} and not drawn.slices else []
    for base in (*bases, free, tight):
        if all({0} <= {base.model_stages[s] for s in flow.stages} for flow in base.flows):
            proved(spread(base, lead=more or 0))
        if len(base.ends) == 1:
            proved(with_parts(base, lead=more or 0))


def test_flows_that_share_stages():
    """Microbatches of two ways, one through a stage more, and copies of a stage that deal them out."""
    flows = [
        Flow((3, 0, 1, 2), (0, 2, 5), ((0, 1), (1, 2))),
        Flow((4, 0, 1, 2), (1, 3), ((0, 1), (1, 2))),
        Flow((0, 1, 2), range(4, 5)),
    ]
    for apart, cap in product((False, True), (None, 3)):
        made = arrange(
            [0, 1, 2, 1, 2], flows, skips=[(3, 0), (4, 0)], replicas=[(3, 4)], apart=apart, cap=cap
        )
        proved(made)
        assert made.model_stages == (0, 1, 2, 3, 3)


def test_an_encoder_in_the_bubbles():
    """As heavy as a stage, it is all but hidden; in front of stage 0 the step takes 103."""
    costs = Costs(forward=1, backward=2)
    made = spread(one_f_one_b(8, 16))
    assert proved(made, costs) == 72
    assert made.replicas == (tuple(range(8, 16)),)
    assert made.skips == tuple((copy, 0) for copy in range(8, 16))
    assert [list(numbers) for numbers in made.numbers[8:]] == [[m, m + 8] for m in range(8)]
    base = simulate(one_f_one_b(8, 16)).peak_activations
    assert all(a <= b + 1 + 2 for a, b in zip(simulate(made).peak_activations, base, strict=True))


@pytest.mark.parametrize(
    ("schedule", "alone", "with_encoder"),
    [
        (one_f_one_b(4, 8), 33, 36),
        (one_f_one_b(4, 16), 57, 62),
        (interleaved_1f1b(4, 8), 57, 60),
        (zbv(4, 8), 51, 56),
        (zbv(8, 16), 103, 108),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_encoders_in_other_schedules(schedule, alone, with_encoder):
    costs = Costs(weight_share=1)
    assert (simulate(schedule, costs).makespan, proved(spread(schedule), costs)) == (alone, with_encoder)


def head_costs(schedule, head, blocks, parts):
    """Costs of blocks that are dealt to all stages, and of an output layer as heavy as some blocks."""
    share, memory = blocks / schedule.stages, schedule.ranks / schedule.stages
    times = (*[share] * schedule.stages, *[head / parts] * parts, 0)
    sizes = (*[memory] * schedule.stages, *[1 / parts] * parts, 0)
    return Costs(times, times, times, activation=sizes, weight_share=1)


def best_cut(schedule, head, blocks):
    """The least time with whole blocks: the last stage has the head and some of them."""
    times = []
    for last in range(blocks):
        even = [(blocks - last + k) // (schedule.stages - 1) for k in range(schedule.stages - 1)]
        times += [(*sizes, last + head) for sizes in (even, even[::-1])]
    return min(simulate(schedule, Costs(t, t, t)).makespan for t in times if min(t) > 0)


@pytest.mark.parametrize(
    ("builder", "ranks", "microbatches", "head", "most"),
    [
        (one_f_one_b, 4, 16, 2.4, 0.94),
        (one_f_one_b, 4, 16, 5, 0.90),
        (one_f_one_b, 8, 32, 2.4, 0.91),
        (one_f_one_b, 8, 32, 5, 0.93),
        (interleaved_1f1b, 8, 16, 5, 0.75),
        (zbv, 8, 16, 5, 0.70),
        (zb_h1, 4, 16, 5, 0.90),
    ],
)
def test_parts_beat_the_best_cut(builder, ranks, microbatches, head, most):
    schedule = builder(ranks, microbatches)
    costs = head_costs(schedule, head, 4 * ranks, ranks)
    made = with_parts(schedule, costs=costs)
    time = proved(made, costs)
    assert work(made, costs) <= time <= most * best_cut(schedule, head, 4 * ranks)
    before = simulate(schedule, Costs(weight_share=1, activation=ranks / schedule.stages)).peak_activations
    more = 2 + 3 / ranks  # microbatches of all stages of the rank, and of its part
    after = simulate(made, costs).peak_activations
    assert all(a <= b + more + 1e-9 for a, b in zip(after, before, strict=True))


PLAIN = [
    name
    for name, build in BUILDERS.items()
    if name not in ("decode", "chimera", "data_parallel")
    and not build(4, 8).slices
    and build(4, 8).ops <= {Op.F, Op.B, Op.I, Op.W}
]


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("lead", [0, 1, 3])
def test_all_builders_take_parts_and_encoders(name, lead):
    """One after the other too: a model with an encoder and a large vocabulary."""
    schedule = BUILDERS[name](4, 8)
    proved(with_parts(schedule, ranks=[2, 0], lead=lead))
    images = spread(place_communication(schedule), microbatches=[6, 1, 3], ranks=[3, 1], lead=lead)
    proved(images)
    assert [list(numbers) for numbers in images.numbers[-2:]] == [[1, 6], [3]]
    both = with_parts(images, lead=lead)
    proved(both)
    assert both.model_stages[-7:] == (
        schedule.stages,
        schedule.stages,
        *range(schedule.stages + 1, schedule.stages + 6),
    )
    kinds = schedule.ops & {Op.B, Op.I, Op.W}
    assert {i.op for r in range(4) for i in both.instructions(r)} == kinds | {Op.F}


def test_two_ways_take_an_encoder():
    made = spread(pp.chimera(4, 8))
    proved(made)
    assert made.model_stages == (0, 1, 2, 3, 0, 1, 2, 3, 4, 4, 4, 4)


def test_messages_that_take_time_are_planned_for():
    sizes = (2, 2, 2, 2, 1, 1, 0)
    times = Costs(sizes, sizes, sizes, activation=sizes, weight_share=1)
    late = replace(times, communication=2)
    blind, planned = (with_parts(zbv(2, 6), costs=costs) for costs in (times, late))
    assert proved(planned, late) < 0.8 * proved(blind, late)


def test_costs_are_of_the_model():
    costs = Costs(forward=[1] * 4 + [3], backward=[2] * 4 + [6])
    made = spread(one_f_one_b(4, 8), costs=costs)
    whole = costs.of_stages(made.model_stages)
    assert proved(made, whole) < simulate(spread(one_f_one_b(4, 8)), whole).makespan + 1
    with pytest.raises(ValueError, match="forward has 4 numbers, expected 5"):
        spread(one_f_one_b(4, 8), costs=Costs(forward=[1] * 4))
    with pytest.raises(ValueError, match="forward has 4 numbers, expected 9"):
        with_parts(one_f_one_b(4, 8), costs=Costs(forward=[1] * 4))


GOLDENS = {
    "spread": (
        spread(one_f_one_b(2, 4), ranks=[1, 0]),
        """\
3F1 0F0 0F1 0F2 3F3 0B0 0F3 0B1 3B1 0B2 0B3 3B3
2F0 2F2 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 2B0 2B2
""",
    ),
    "parts": (
        with_parts(one_f_one_b(2, 4)),
        """\
0F0 0F1 2F0 0F2 2B0 2F1 2B1 0B0 2F2 0F3 0B1 2B2 2F3 2B3 0B2 0B3
1F0 3F0 4F0 4B0 3B0 1F1 3F1 4F1 4B1 3B1 1B0 1F2 3F2 1B1 4F2 4B2 3B2 1F3 3F3 4F3 4B3 3B3 1B2 1B3
""",
    ),
    "parts of zbv": (
        with_parts(zbv(2, 2)),
        """\
0F0 0F1 3F0 4F0 6F0 6I0 4I0 3I0 6W0 4W0 3W0 3F1 4F1 6F1 6I1 4I1 3I1 6W1 4W1 3W1 0I0 0W0 0I1 0W1
1F0 2F0 1F1 5F0 5I0 5W0 2F1 2I0 1I0 5F1 5I1 5W1 2W0 1W0 2I1 1I1 2W1 1W1
""",
    ),
}


@pytest.mark.parametrize("name", GOLDENS)
def test_goldens(name):
    schedule, programs = GOLDENS[name]
    assert f"{schedule}\n" == programs


@pytest.mark.parametrize("function", [spread, with_parts])
@pytest.mark.parametrize(
    ("schedule", "found"),
    [
        (seq1f1b(2, 2, 2), "slices"),
        (insert_recomputes(one_f_one_b(2, 4), [0]), "RECOMPUTE"),
        (append_tail(one_f_one_b(2, 4)), "REDUCE_GRAD"),
        (pp.dualpipe(2, 4), "OVERLAP_F_B"),
    ],
    ids=["slices", "recompute", "tail", "pairs"],
)
def test_other_schedules_are_refused(function, schedule, found):
    with pytest.raises(ValueError, match=f"^schedule: got .* with {found}, expected F, B, I and W alone"):
        function(schedule)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: spread(one_f_one_b(2, 4), into=2), "into: got 2, expected a stage of the model"),
        (
            lambda: spread(one_f_one_b(2, 4), microbatches=[4]),
            "microbatches: got 4, expected a number from 0",
        ),
        (
            lambda: spread(one_f_one_b(2, 4), microbatches=[1, 1]),
            "microbatches: got .1, 1., expected different",
        ),
        (
            lambda: spread(one_f_one_b(2, 4), microbatches=[]),
            "microbatches: got .., expected different numbers",
        ),
        (lambda: spread(one_f_one_b(2, 4), ranks=[2]), "ranks: got 2, expected a number from 0 to 1"),
        (lambda: spread(one_f_one_b(2, 4), lead=-1), "lead = -1, expected an integer of at least 0"),
        (
            lambda: with_parts(one_f_one_b(2, 4), ranks=[0, 0]),
            "ranks: got .0, 0., expected different numbers",
        ),
        (lambda: with_parts(pp.chimera(2, 4)), "schedule: got chimera with several last stages"),
        (
            lambda: arrange([0, 0], [Flow((0, 1), range(2))], cap=1),
            "cap: got 1, expected at least 2, the act",
        ),
        (
            lambda: arrange([0, 1], [Flow((0, 1), range(2))], cap=[1]),
            "cap: got 1 numbers, expected 2, one per",
        ),
        (lambda: arrange([0, 1], [Flow((0, 1), range(2), ((1, 0),))]), "flow 0 has the edge .1, 0. against"),
        (lambda: arrange([0.0, 1], [Flow((0, 1), range(2))]), r"placement\[0\] = 0.0, expected an integer"),
        (lambda: arrange(None, [Flow((0, 1), range(2))]), "placement: got None of type NoneType, expected a"),
        (lambda: arrange([0, 1], [((0, 1), range(2))]), "flow 0 is a tuple, expected a Flow"),
        (lambda: arrange([0, 1], [Flow((0, 1), 3)]), "flow 0 has microbatches 3, expected a range"),
        (lambda: arrange([0, 1], [Flow((0, 1), range(2))], skips=None), "skips: got None of type NoneType"),
        (lambda: arrange([0, 1], [Flow((0, 1), range(2))], costs={}), "costs: got {} of type dict"),
        (lambda: arrange([0, 1], [Flow((0, 1), range(2))], cap=[None, 2]), "cap is None of type NoneType"),
        (lambda: spread(one_f_one_b(2, 4), microbatches=2), "microbatches: got 2 of type int, expected num"),
        (lambda: spread(one_f_one_b(2, 4), into=1.0), "into: got 1.0 of type float, expected a stage"),
        (
            lambda: arrange([0], [Flow((0, 1), range(2))]),
            "flow 0 names stage 1, expected a stage from 0 to 0",
        ),
    ],
)
def test_refusals(call, message):
    with pytest.raises((TypeError, ValueError, ScheduleError), match=message):
        call()
