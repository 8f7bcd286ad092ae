"""What is particular to single builders: orders, where weight gradients begin, groups, refused arguments."""

from __future__ import annotations

import inspect
from itertools import product

import pytest

from ppfunc.schedule import (
    BUILDERS,
    chimera,
    find_builder,
    gpipe,
    interleaved_1f1b,
    interleaved_zb,
    one_f_one_b,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zbv,
)
from ppfunc.schedule.costs import Costs
from ppfunc.schedule.errors import ScheduleError
from ppfunc.schedule.instruction import Op
from ppfunc.schedule.passes.running import linearize
from ppfunc.schedule.proof.timeline import simulate


def rows(schedule):
    """The text of every rank's program."""
    return [" ".join(map(str, schedule.instructions(r))) for r in range(schedule.ranks)]


def test_one_f_one_b_with_fewer_microbatches_than_ranks():
    assert rows(one_f_one_b(4, 2)) == [
        "0F0 0F1 0B0 0B1",
        "1F0 1F1 1B0 1B1",
        "2F0 2F1 2B0 2B1",
        "3F0 3B0 3F1 3B1",
    ]


def megatron(ranks: int, microbatches: int, chunks: int, group: int, rank: int) -> list[str]:
    """Interleaved 1F1B from the closed form of the k-th forward, group by group."""
    full = microbatches // group * group

    def kth(k: int) -> tuple[int, int]:
        size = group if k < full * chunks else microbatches - full
        k, first = (k, 0) if k < full * chunks else (k - full * chunks, full)
        return k % (size * chunks) // size, first + k // (size * chunks) * size + k % size

    total = microbatches * chunks
    warm_up = min(total, 2 * (ranks - rank - 1) + (chunks - 1) * group)
    out = []
    for k in range(total + warm_up):
        if k < total:
            chunk, m = kth(k)
            out.append(f"{chunk * ranks + rank}F{m}")
        if k >= warm_up:
            chunk, m = kth(k - warm_up)
            out.append(f"{(chunks - 1 - chunk) * ranks + rank}B{m}")
    return out


def test_interleaved_1f1b_is_megatrons():
    """Where the last group is full, or not smaller than the number of ranks, as Megatron demands."""
    compared = 0
    for p, v, n, m in product(range(1, 7), (2, 3), range(1, 12), range(1, 25)):
        if n < p or n > m or 0 < m % n < p:
            continue
        schedule = interleaved_1f1b(p, m, v, group=n)
        for r in range(p):
            assert [str(i) for i in schedule.instructions(r)] == megatron(p, m, v, n, r), (p, m, v, n)
        compared += 1
    assert compared > 500


def test_the_default_group():
    """Even groups as in torch; where there are none, p with a smaller last group, if that does not stall."""
    for p, m, v, n in [
        (4, 8, 2, 4),
        (4, 10, 2, 5),
        (4, 3, 2, 3),
        (4, 4, 3, 4),
        (4, 9, 2, 4),
        (4, 9, 3, 5),
        (6, 15, 2, 7),
    ]:
        schedule = interleaved_1f1b(p, m, v)
        assert [str(i) for i in schedule.instructions(0)] == megatron(p, m, v, n, 0), (p, m, v)
        linearize(schedule)


def test_as_many_microbatches_as_ranks_are_never_more_than_all_forwards_of_warm_up():
    program = rows(interleaved_1f1b(4, 4))[0]
    assert program.split() == [f"{s}F{m}" for s in (0, 4) for m in range(4)] + [
        f"{s}B{m}" for s in (4, 0) for m in range(4)
    ]


def test_exactly_the_groups_that_stall_are_refused(monkeypatch):
    module = inspect.getmodule(interleaved_1f1b)
    refused = 0
    for p, v, n, m in product(range(1, 7), (1, 2, 3), range(1, 9), range(1, 14)):
        try:
            interleaved_1f1b(p, m, v, group=n)
        except ValueError as error:
            assert f"group = {n}, expected groups that do not stall the pipeline" in str(error)
            stalls = True
        else:
            stalls = False
        with monkeypatch.context() as patch:
            patch.setattr(module, "group_size", lambda ranks, microbatches, chunks, group: group)
            schedule = interleaved_1f1b(p, m, v, group=n)
        if stalls:
            refused += 1
            with pytest.raises(ScheduleError):
                linearize(schedule)
        else:
            linearize(schedule)
    assert refused > 100


def test_zb_h1_is_interleaved_zb_with_one_chunk():
    assert zb_h1(5, 9).programs == interleaved_zb(5, 9, chunks=1).programs


@pytest.mark.parametrize(("build", "late"), [(zb_h1, lambda r: r + 1), (zb_h2, lambda r: 2 * r + 1)])
def test_where_the_weight_gradients_begin(build, late):
    for rank in range(4):
        ops = [i.op for i in build(4, 12).instructions(rank)]
        assert ops[: ops.index(Op.W)].count(Op.I) == late(rank)


@pytest.mark.parametrize("build", [zbv, v_half, v_min])
def test_weight_gradients_follow_the_order_of_the_input_gradients(build):
    """First in, first out, for each stage: the order in which gradients are summed."""
    for program in build(4, 9).programs:
        inputs, weights = ([i[1:3] for (i,) in program if i.op is op] for op in (Op.I, Op.W))
        for stage in {s for s, _ in inputs}:
            assert [x for x in inputs if x[0] == stage] == [x for x in weights if x[0] == stage]


@pytest.mark.parametrize("costs", [(2, 3, 1), (3, 4, 2), (4, 4, 1), (10, 12, 8)])
@pytest.mark.parametrize(
    ("name", "bubble"),
    [
        ("gpipe", lambda f, i, w: f + i + w),
        ("1f1b", lambda f, i, w: f + i + w),
        ("looped_bfs", lambda f, i, w: f + i + w),
        ("interleaved_1f1b", lambda f, i, w: f + i + w),
        ("interleaved_zb", lambda f, i, w: f + i - w),
        ("zb_h1", lambda f, i, w: f + i - w),
        ("zb_h2", lambda f, i, w: f + i - 2 * w),
    ],
)
def test_the_bubble_of_each_rank_that_follows_at_other_costs(name, bubble, costs):
    f, i, w = costs
    for p, m in ((2, 8), (4, 16), (6, 24)):
        timeline = simulate(BUILDERS[name](p, m), Costs(forward=f, backward_input=i, backward_weight=w))
        work = timeline.makespan - timeline.idle[0]
        assert timeline.span - work == (p - 1) * bubble(f, i, w)


@pytest.mark.parametrize(("f", "w", "pair"), [(1, 1, 3), (1, 1, 2), (4, 1, 8), (3, 2, 6), (5, 5, 11)])
def test_the_bubble_of_dualpipe_at_other_costs(f, w, pair):
    costs = {"forward": f, "backward_input": f, "backward_weight": w, "overlapped": pair}
    for p, m in ((2, 8), (4, 16), (8, 20)):
        for name, hops in (("dualpipe", p // 2 - 1), ("dualpipev", p - 1)):
            assert max(simulate(BUILDERS[name](p, m), Costs(**costs)).idle) == hops * (pair + f + w - 3 * w)


def test_the_bubble_of_chimera():
    """Where forward and backward take the same time, and the microbatches fill units of as many as there are
    ranks.
    """
    for p in (2, 4, 6, 8):
        for m in (p, 2 * p, 5 * p):
            timeline = simulate(chimera(p, m), Costs(backward=1))
            assert timeline.makespan == 2 * m + p - 2
            assert set(timeline.idle) == {p - 2}


CHOICES = [
    (name, argument) for name, build in BUILDERS.items() for argument in inspect.signature(build).parameters
]


@pytest.mark.parametrize(
    ("name", "argument"),
    [c for c in CHOICES if c[1] in ("ranks", "microbatches", "sequences", "slices", "chunks")],
)
@pytest.mark.parametrize("value", [0, -1, 2.0, "4", True, None])
def test_counts_are_whole_and_positive(name, argument, value):
    least = 2 if (name, argument) == ("decode", "ranks") else 1
    told = rf"{argument} = .*, expected an integer of at least {least}: pass {argument}={least} or more"
    with pytest.raises(ValueError, match=told):
        BUILDERS[name](
            **dict(zip(inspect.signature(BUILDERS[name]).parameters, (2, 4), strict=False))
            | {argument: value}
        )


@pytest.mark.parametrize("value", [0, -3, 1.5])
def test_a_group_is_whole_and_positive(value):
    with pytest.raises(ValueError, match=r"group = .*, expected an integer of at least 1"):
        interleaved_1f1b(2, 4, group=value)


@pytest.mark.parametrize("name", BUILDERS)
def test_a_schedule_has_the_name_that_lists_and_functions_have(name):
    """But for a function whose name Python cannot spell."""
    assert BUILDERS[name](2, 4).name == name
    assert BUILDERS[name].__name__ == {"1f1b": "one_f_one_b"}.get(name, name)
    assert find_builder(name) is find_builder(BUILDERS[name].__name__) is BUILDERS[name]


@pytest.mark.parametrize(
    ("name", "builder"),
    [
        ("1F1B", one_f_one_b),
        ("Schedule1F1B", one_f_one_b),
        ("GPipe", gpipe),
        ("Interleaved1F1B", interleaved_1f1b),
        ("InterleavedZeroBubble", interleaved_zb),
        ("ZBVZeroBubble", zbv),
        ("one_f_one_b", one_f_one_b),
        ("one-f-one-b", one_f_one_b),
    ],
)
def test_names_of_torch_and_other_spellings(name, builder):
    assert find_builder(name) is builder


def test_unknown_names_show_the_known_ones():
    with pytest.raises(
        ValueError, match="unknown schedule 'gpip': expected one of gpipe, .*did you mean 'gpipe'"
    ):
        find_builder("gpip")
