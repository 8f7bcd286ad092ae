"""Schedules of slices of sequences: carries in proof, time, plans, text and pictures."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product

import pytest
from hypothesis import given, strategies as st

from ppfunc.schedule import (
    B,
    Costs,
    F,
    ScheduleError,
    allocate_slots,
    check,
    compare_schedules,
    forward_only,
    from_csv,
    from_json,
    insert_recomputes,
    one_f_one_b,
    overlap,
    place_communication,
    plan,
    seq1f1b,
    seq_zb,
    simulate,
    single_chain,
    to_csv,
    to_json,
    to_svg,
    to_torch_csv,
    zb_h1,
)
from tests.schedule.reference import Model
from tests.schedule.test_certificate_reference import with_steps
from tests.schedule.written import is_accepted

SIZES = [*product((1, 2, 3, 4, 6), (1, 2, 3, 5), (1, 2, 3, 8))]  # ranks, sequences, slices


@pytest.mark.parametrize("ranks, sequences, slices", SIZES)
def test_bubble_and_peak_are_the_closed_forms(ranks, sequences, slices):
    m = sequences * slices
    schedule = seq1f1b(ranks, sequences, slices)
    timeline = simulate(schedule, Costs(forward=Fraction(1, 2), backward=1))
    assert timeline.bubble == Fraction(ranks - 1, m + ranks - 1)
    assert check(schedule).peak_activations == tuple(min(ranks - r + slices - 1, m) for r in range(ranks))
    apart = seq_zb(ranks, sequences, slices)
    check(apart)
    if m >= ranks + slices - 1:
        assert simulate(apart).makespan == 3 * m + ranks - 1


def test_labels_stay_legible_in_every_shade():
    picture = to_svg(seq1f1b(2, 2, 8, 4))
    faded = {float(value) for value in re.findall(r'fill-opacity="([\d.]+)"', picture)}
    assert min(faded) >= 0.45 and len(faded) > 20
    assert min(map(float, re.findall(r'fill-opacity="([\d.]+)"', to_svg(seq1f1b(2, 2, 8))))) == 0.45


@pytest.mark.parametrize("build", [seq1f1b, seq_zb])
@pytest.mark.parametrize("ranks, sequences, slices", SIZES)
@pytest.mark.parametrize("chunks", [2, 3])
def test_stages_in_turn_never_stall(build, ranks, sequences, slices, chunks):
    check(place_communication(build(ranks, sequences, slices, chunks)))


def test_one_slice_is_the_schedule_of_whole_sequences():
    for build, known in ((seq1f1b, one_f_one_b), (seq_zb, zb_h1)):
        assert build(4, 6, 1).programs == known(4, 6).programs and build(4, 6, 1).slices == 1


def test_figures_for_eight_ranks_and_eight_sequences():
    """As Sun et al. find: four slices have less bubble than ZB-H1, and a third of its memory."""
    rows = {
        row.name: row
        for row in compare_schedules(8, 8, ["1f1b", "zb_h1", seq1f1b(8, 8, 4)], Costs(backward=2)).rows
    }
    found = {name: (round(float(row.timeline.bubble), 3), row.peak_activations) for name, row in rows.items()}
    assert found == {"1f1b": (0.467, 8), "zb_h1": (0.226, 8), "seq1f1b": (0.179, 2.75)}


def tampered():
    """Schedules that compute everything once, but a slice before the slice that it needs."""
    for build, lowered in product((seq1f1b, seq_zb), (False, True)):
        schedule = build(2, 2, 3)
        schedule = place_communication(schedule) if lowered else schedule
        for rank, op in product((0, 1), "FBI"):
            steps = [
                (n, place, i)
                for n, step in enumerate(schedule.programs[rank])
                for place, i in enumerate(step)
                if i.op == op
            ]
            for (n, place, one), (k, other_place, other) in pairwise(steps):
                if one.microbatch // 3 != other.microbatch // 3:
                    continue

                def swap(program, n=n, place=place, k=k, other_place=other_place):
                    here, there = program[n], program[k]
                    here[place], there[other_place] = there[other_place], here[place]

                yield with_steps(schedule, rank, swap)


TAMPERED = list(tampered())


def test_a_tampered_order_is_refused():
    """Both by the proof and by a slow model that shares no code with it."""
    assert len(TAMPERED) >= 40
    for schedule in TAMPERED:
        assert not Model(schedule).accepts() and not is_accepted(schedule)


def test_a_tampered_order_is_told_with_its_slice_and_a_mark():
    rows = [[F(0, 0), F(0, 1), B(0, 0), B(0, 1)]]
    with pytest.raises(ScheduleError) as told:
        check(single_chain("mine", [0], 2, rows, slices=2))
    reason = "it needs the input gradient of stage 0 for microbatch 1 (slice 0.1), which this rank has not"
    assert reason in str(told.value) and re.search(r"rank 0, step 2, place 0, 0B0", str(told.value))
    rows = [[F(0, 1), F(0, 0), B(0, 1), B(0, 0)]]
    with pytest.raises(
        ScheduleError, match=r"0F1: it needs the output of stage 0 for microbatch 0 \(slice 0.0\)"
    ):
        check(single_chain("mine", [0], 2, rows, slices=2))


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.booleans(), st.booleans())
def test_formats_keep_slices(ranks, sequences, slices, apart, lowered):
    schedule = (seq_zb if apart else seq1f1b)(ranks, sequences, slices)
    assert from_csv(to_csv(schedule), schedule.name) == schedule
    schedule = place_communication(schedule) if lowered else schedule
    assert from_json(to_json(schedule)) == schedule
    assert from_csv(to_csv(schedule), schedule.name).slices == slices


def test_schedules_that_differ_in_slices_differ():
    schedule = seq1f1b(2, 2, 2)
    assert replace(schedule, slices=1).digest != schedule.digest != replace(schedule, slices=4).digest


def test_pictures_number_slices_and_shade_them():
    picture = to_svg(seq1f1b(2, 3, 2))
    assert ">2.0</text>" in picture and ">2.1</text>" in picture
    assert "the 2 slices of a sequence, in order" in picture and "2 slices to a sequence" in picture
    assert 'fill-opacity="0.45"' in picture


@pytest.mark.parametrize(
    "slices, reason", [(-1, "slices is -1"), (True, "slices is True"), (3, "whole sequences")]
)
def test_slices_that_do_not_fit_are_refused(slices, reason):
    with pytest.raises(ScheduleError, match=reason):
        check(replace(one_f_one_b(2, 4), slices=slices))


def test_chains_that_part_a_sequence_are_refused():
    from ppfunc.schedule import dualpipe

    with pytest.raises(
        ScheduleError, match="flow 0 has microbatches 0 to 4, expected whole sequences of 2 slices"
    ):
        check(replace(dualpipe(2, 10), slices=2))


@pytest.mark.parametrize(
    "head", ["slices=0", "slices=x", "slices=", "slices=1.5", "slices=-2", "slices=9999999999"]
)
def test_a_first_line_that_is_no_number_of_slices_is_refused(head):
    with pytest.raises(
        ValueError, match="line 1: got 'slices=.*expected a number of slices, such as slices=4"
    ):
        from_csv(f"{head}\n0F0,0B0\n")


def test_what_slices_cannot_have_is_refused_in_one_sentence():
    schedule = seq1f1b(2, 2, 2)
    for refused, reason in (
        (lambda: allocate_slots(schedule), "seq1f1b has slices, whose carries outlive the slot"),
        (lambda: to_torch_csv(schedule), "seq1f1b has slices with a carry, which torch's runtime has not"),
        (lambda: plan(2, 5, slices=2), "microbatches = 5, expected whole sequences of 2 slices"),
        (lambda: plan(2, 4, Costs(recompute=1), cap=4, slices=2), "residuals of slices stay"),
        (
            lambda: plan(2, 8, cap=3, slices=4),
            "the 4 slices of a sequence and the parameters of rank 0 take 4",
        ),
        (lambda: compare_schedules(2, 2, [schedule], Costs(forward=[1, 2])), "slices share costs of a rank"),
    ):
        with pytest.raises(ValueError, match=reason):
            refused()
    slotted = replace(schedule, programs=tuple(
        tuple(tuple(i._replace(slot=0) for i in step) for step in program) for program in schedule.programs
    ))  # fmt: skip
    with pytest.raises(
        ScheduleError, match="it has a slot, which holds one microbatch, but carries of slices live on"
    ):
        check(slotted)


@pytest.mark.parametrize("placement, chunks", [("loop", 1), ("loop", 2), ("v", 2), ("v", 3)])
@pytest.mark.parametrize("slices", [2, 4])
def test_plans_respect_carries(placement, chunks, slices):
    """Also in a V, for which there is no builder; and are not longer than what a builder makes."""
    sizes = {"placement": placement, "chunks": chunks, "slices": slices, "effort": 0.05}
    found = plan(3, 4 * slices, Costs(weight_share=1), objective="span", **sizes)
    check(place_communication(found.schedule))
    assert Model(found.schedule).accepts() and found.schedule.slices == slices
    assert found.value >= found.bound.value
    if placement == "loop":
        assert found.value <= simulate(seq_zb(3, 4, slices, chunks)).span


def test_a_cap_of_one_sequence_is_kept():
    found = plan(3, 8, Costs(weight_share=1), placement="loop", slices=4, cap=4, effort=0.05)
    assert max(check(found.schedule).peak_activations) == 4


def test_forwards_alone_and_recomputation_keep_slices():
    schedule = seq1f1b(3, 2, 4)
    assert check(forward_only(schedule)).peak_activations == (1, 1, 1)
    check(place_communication(forward_only(schedule)))
    check(place_communication(insert_recomputes(schedule)))


def test_slices_share_the_costs_of_a_rank():
    costs = Costs(
        forward=4, backward=8, activation=2, bytes=16, bandwidth=1, parameters=3, step=5, checkpoint=8
    )
    shared = costs.per_rank(seq1f1b(2, 2, 4))
    assert (shared.forward, shared.backward, shared.activation, shared.bytes) == (1, 2, Fraction(1, 2), 4)
    assert (shared.parameters, shared.step, shared.checkpoint) == (3, 5, 2)


def slow_times(schedule, costs):
    """Run the instructions of ranks in turn, each from the ends of what it needs; and sum what they hold."""
    k, ends, peaks = schedule.slices, {}, [0] * schedule.ranks
    last, home = schedule.stages - 1, schedule.placement
    now, live, rows = [0] * schedule.ranks, [0] * schedule.ranks, [[*p] for p in schedule.programs]

    def needed(op, s, m):
        along = m % k
        match op:
            case "F":
                return [("F", s - 1, m)] * (s > 0) + [("F", s, m - 1)] * (along > 0)
            case "W":
                return [("I", s, m)]
        back = [("F", s, m)] + [(op, s + 1, m)] * (s < last) + [(op, s, m + 1)] * (along < k - 1)
        return back

    while any(rows):
        before = sum(map(len, rows))
        for rank, row in enumerate(rows):
            while row:
                [(op, s, m, *_)] = row[0]
                needs = needed(str(op), s, m)
                if not all(need in ends for need in needs):
                    break
                of = costs.slices[m % k]
                start = now[rank]
                for need in needs:
                    late = of.message_of(need[1]) if home[need[1]] != rank else 0
                    start = max(start, ends[need] + late)
                now[rank] = ends[str(op), s, m] = start + of.time_of(op, s)
                size, share = of.of("activation", s), of.of("weight_share", s)
                live[rank] += size if op == "F" else 0
                peaks[rank] = max(peaks[rank], live[rank])
                live[rank] -= {"F": 0, "B": size, "I": size - size * share, "W": size * share}[op]
                row.pop(0)
        assert sum(map(len, rows)) < before
    return {(str(op), s, m): end for (op, s, m), end in ends.items()}, tuple(peaks)


@given(
    st.sampled_from([seq1f1b, seq_zb]), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4),
    st.integers(1, 2), st.randoms(use_true_random=False),
)  # fmt: skip
def test_slices_of_unlike_costs_take_what_each_costs(build, ranks, sequences, slices, chunks, random):
    schedule = build(ranks, sequences, slices, chunks)
    names = ("forward", "backward_input", "backward_weight", "communication", "activation")

    def numbers():
        return [Fraction(random.randrange(9), 2) for _ in range(schedule.stages)]

    each = [Costs(**{n: numbers() for n in names}, weight_share=Fraction(1, 2)) for _ in range(slices)]
    costs = Costs(forward=[99] * schedule.stages, slices=each)
    timeline = simulate(schedule, costs)
    ends, peaks = slow_times(schedule, costs)
    if slices == 1:
        return
    assert {(str(i.op), i.stage, i.microbatch): end for row in timeline.rows() for i, _, end in row} == ends
    assert timeline.peak_activations == peaks
    lowered = simulate(place_communication(schedule), costs)
    assert (lowered.makespan, lowered.peak_activations) == (timeline.makespan, peaks)
    again = timeline.costs()
    assert [of.forward for of in again.slices] == [tuple(of.forward) for of in each]
    assert again.forward == tuple(map(sum, zip(*(of.forward for of in each), strict=True)))
    alike = replace(costs, slices=[replace(of, communication=0) for of in each])
    assert simulate(schedule, again).makespan == simulate(schedule, alike).makespan


def test_costs_of_slices_reach_pairs_copies_and_pictures():
    pair = overlap(F(0, 2), B(0, 1))
    word = [F(0, 0), F(0, 1), pair, B(0, 0), F(0, 3), B(0, 3), B(0, 2)]
    schedule = single_chain("pairs", [0], 4, [word], slices=2)
    each = [Costs(forward=1, backward=10), Costs(forward=2, backward=20)]
    ends = simulate(schedule, Costs(slices=each)).ends[0]
    assert ends == (1, 3, 1 + 20 + 3, 34, 36, 56, 66)
    own = [replace(each[0], overlapped=5), each[1]]
    assert simulate(schedule, Costs(slices=own)).ends[0][2] == 8
    moved = insert_recomputes(seq1f1b(1, 1, 2))
    each = [Costs(forward=1, recompute=3), Costs(forward=2, recompute=5)]
    assert simulate(moved, Costs(slices=each)).makespan == 3 + 8 + 2 + 2
    timeline = simulate(seq1f1b(2, 2, 2), Costs(slices=each))
    widths = re.findall(r'width="([\d.]+)" height="[\d.]+"[^>]*><title>0F[01]', to_svg(timeline))
    assert len(set(widths)) == 2


def test_costs_of_slices_are_honoured_or_refused():
    each = [Costs(forward=1), Costs(forward=3)]
    costs = Costs(forward=4, slices=each)
    assert simulate(one_f_one_b(1, 2), costs).makespan == 2 * (4 + 2)
    assert simulate(seq1f1b(1, 1, 2), costs).makespan == 4 + 4
    for of in (simulate, compare):
        with pytest.raises(ValueError, match="slices has costs of 2 slices, expected 4, one per slice"):
            of(seq1f1b(2, 2, 4), costs)
    with pytest.raises(ValueError, match="forward has 2 numbers, expected 1"):
        simulate(seq1f1b(1, 1, 2), Costs(slices=[Costs(forward=[1, 2])] * 2))
    with pytest.raises(ValueError, match="a plan and its bound take slices of equal costs"):
        plan(2, 4, costs, slices=2)
    with pytest.raises(TypeError, match=r"slices\[0\]"):
        Costs(slices=[1, 2])
    rows = compare_schedules(2, 2, [seq1f1b(2, 2, 2), "1f1b"], costs=costs)
    assert [row.bound is None for row in rows.rows] == [row.name == "seq1f1b" for row in rows.rows]
    shared = Costs(forward=8, slices=[Costs(forward=2, bytes=3), Costs(forward=6)]).per_rank(
        seq1f1b(2, 2, 2, 2)
    )
    assert (shared.forward, [of.forward for of in shared.slices], shared.slices[0].bytes) == (4, [1, 3], 3)
    assert "slice 1" in str(costs) and "3" in str(costs).splitlines()[-1]
    per_stage = Costs(forward=[1, 2], slices=[Costs(forward=[1, 2]), Costs(forward=[3, 4])])
    assert per_stage.of_stages([1, 0]).slices[1].forward == (4, 3)


def compare(schedule, costs):
    return compare_schedules(schedule.ranks, 2, [schedule], costs=costs)
