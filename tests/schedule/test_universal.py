"""What holds for every schedule that a builder makes, for any number of ranks, microbatches and chunks.

A new builder is in all of these tests by its line in ``BUILDERS``, or in ``ALL``; a constraint of its
arguments, its formulas and its bound of memory are one line each in the tables below.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import given, strategies as st

from ppfunc.schedule import (
    BUILDERS,
    append_tail,
    chimera,
    compute_only,
    from_csv,
    from_json,
    insert_unshards,
    place_communication,
    reduce_early,
    remove_tail,
    remove_unshards,
    to_csv,
    to_json,
)
from ppfunc.schedule.builders.patterns import group_size
from ppfunc.schedule.costs import Costs
from ppfunc.schedule.instruction import COMMUNICATION, COMPUTE, SHARDING, TAIL, Op, parts_of
from ppfunc.schedule.passes.running import linearize
from ppfunc.schedule.proof.certificate import check
from ppfunc.schedule.proof.timeline import simulate
from ppfunc.schedule.schedule import Schedule
from tests.conftest import few


def slices(microbatches: int) -> int:
    return 2 - microbatches % 2


def by_microbatches(build: Callable[..., Schedule]) -> Callable[..., Schedule]:
    """A builder of sequences as a builder of microbatches, in two slices each where their number is even."""

    def built(ranks, microbatches, **chunks):
        return build(ranks, microbatches // slices(microbatches), slices(microbatches), **chunks)

    taken = inspect.signature(build).parameters
    if "slices" in taken:
        named = [parameter for name, parameter in taken.items() if name not in ("sequences", "slices")]
        microbatches = inspect.Parameter("microbatches", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        built.__signature__ = inspect.Signature([named[0], microbatches, *named[1:]])
    return built if "slices" in taken else build


ALL = {name: by_microbatches(build) for name, build in (BUILDERS | {"chimera": chimera}).items()}


class Case(NamedTuple):
    """A schedule and the arguments that made it: p ranks, m microbatches, v chunks per rank."""

    schedule: Schedule
    p: int
    m: int
    v: int


# The ranks and microbatches that a builder accepts, where not all are.
ACCEPTS = {
    "decode": lambda p, m: p > 1,
    "dualpipe": lambda p, m: p % 2 == 0 and m % 2 == 0 and m >= 2 * p,
    "dualpipev": lambda p, m: m >= 2 * p,
    "chimera": lambda p, m: p % 2 == 0 and m % 2 == 0,
}

# Bound of live activations on the worst rank, each of one stage and microbatch, from its F to its B or W.
PEAK = {
    "gpipe": lambda p, m, v: m,
    "1f1b": lambda p, m, v: min(p, m),
    "inference": lambda p, m, v: m,
    "decode": lambda p, m, v: m,
    "data_parallel": lambda p, m, v: 1,
    "interleaved_1f1b": lambda p, m, v: min(m * v, (v - 1) * group_size(p, m, v) + 2 * (p - 1) + 1),
    "looped_bfs": lambda p, m, v: m * v,
    "zb_h1": lambda p, m, v: min(p, m),
    "zb_h2": lambda p, m, v: min(2 * p - 1, m),
    "interleaved_zb": lambda p, m, v: min(m * v, (v - 1) * group_size(p, m, v) + p),
    "zbv": lambda p, m, v: min(2 * p, 2 * m),
    "zbv_greedy": lambda p, m, v: min(2 * p, 2 * m),
    "v_half": lambda p, m, v: min(2 * ((p + 2) // 2), 2 * m),
    "v_min": lambda p, m, v: min(2 * ((p + 4) // 3), 2 * m),
    "dualpipe": lambda p, m, v: p + 1,
    "dualpipev": lambda p, m, v: 2 * p + 1,
    "zero_bubble": lambda p, m, v: min(p, m),
    "seq1f1b": lambda p, m, v: min(
        m * v, (v - 1) * group_size(p, m, v, slices=slices(m)) + (1 + (v > 1)) * (p - 1) + slices(m)
    ),
    "seq_zb": lambda p, m, v: min(m * v, (v - 1) * group_size(p, m, v, slices=slices(m)) + p + slices(m) - 1),
    "chimera": lambda p, m, v: min(p, m),
    "deepspeed_train": lambda p, m, v: min(p, m),
    "deepspeed_inference": lambda p, m, v: m,
}

# Idle time of every rank in the makespan where F = I = W = 1, B = 2, an overlapped pair 3 for each stage, and
# for which numbers of ranks and microbatches that is so.
IDLE = {
    "gpipe": (lambda p, v: 3 * (p - 1), lambda p, m: True),
    "1f1b": (lambda p, v: 3 * (p - 1), lambda p, m: True),
    "inference": (lambda p, v: p - 1, lambda p, m: True),
    "decode": (lambda p, v: p - 1, lambda p, m: m >= p * slices(m)),
    "data_parallel": (lambda p, v: 0, lambda p, m: True),
    "interleaved_1f1b": (lambda p, v: 3 * (p - 1), lambda p, m: m >= p and m % (m // p) == 0),
    "looped_bfs": (lambda p, v: 3 * (p - 1), lambda p, m: m >= p),
    "zb_h1": (lambda p, v: p - 1, lambda p, m: m >= p),
    "zb_h2": (lambda p, v: p - 1, lambda p, m: m >= 2 * p - 1),
    "interleaved_zb": (lambda p, v: p - 1, lambda p, m: m >= p and m % (m // p) == 0),
    "zbv": (lambda p, v: p - 1, lambda p, m: m >= 2 * p - 1),
    "v_half": (lambda p, v: {1: 0, 2: 1}.get(p, 3 * p - (4 if p % 2 else 7)), lambda p, m: p == 1 or m > p),
    "v_min": (lambda p, v: 4 * p - (7, 5, 6)[p % 3] if p > 1 else 0, lambda p, m: p == 1 or m > p),
    "dualpipe": (lambda p, v: p - 2, lambda p, m: True),
    "dualpipev": (lambda p, v: 2 * (p - 1), lambda p, m: True),
    "zero_bubble": (lambda p, v: p - 1, lambda p, m: m >= p),
    "seq1f1b": (lambda p, v: 3 * (p - 1), lambda p, m: m >= p and m % (m // p * slices(m)) == 0),
    "seq_zb": (lambda p, v: p - 1, lambda p, m: m > p and m % (m // p * slices(m)) == 0),
    "deepspeed_train": (lambda p, v: 3 * (p - 1), lambda p, m: True),
    "deepspeed_inference": (lambda p, v: p - 1, lambda p, m: True),
}

# Schedules whose ranks are idle only before their first and after their last instruction.
NO_BUBBLE_IN_SPAN = ("zb_h2", "zbv")


def every_builder(test):
    """Ten examples of each builder: two hundred of a property."""
    return pytest.mark.parametrize("name", ALL)(few(7)(test))


def arguments(name: str, max_ranks: int = 8, max_microbatches: int = 18) -> st.SearchStrategy[dict[str, Any]]:
    """The keyword arguments that a builder accepts, every option drawn."""
    accepts = ACCEPTS.get(name, lambda p, m: True)
    counts = [
        (p, m) for p in range(1, max_ranks + 1) for m in range(1, max_microbatches + 1) if accepts(p, m)
    ]
    options = {"chunks": st.integers(1, 4), "order": st.sampled_from(["source", "head"])}
    chosen = {o: s for o, s in options.items() if o in inspect.signature(ALL[name]).parameters}
    pairs = st.sampled_from(counts).map(lambda c: {"ranks": c[0], "microbatches": c[1]})
    return st.tuples(pairs, st.fixed_dictionaries(chosen)).map(lambda parts: parts[0] | parts[1])


def cases(name: str) -> st.SearchStrategy[Case]:
    """The schedules of a builder."""
    return arguments(name).map(
        lambda a: Case(ALL[name](**a), a["ranks"], a["microbatches"], a.get("chunks", 1))
    )


def lowered(schedule: Schedule) -> Schedule:
    """With communication, be it the builder's own or placed now."""
    return schedule if schedule.has_messages else place_communication(schedule)


@every_builder
@given(data=st.data())
def test_complete(name, data):
    """Each stage has one forward and, unless there is none at all, one backward, whole or in two, of each
    microbatch.
    """
    schedule = data.draw(cases(name)).schedule
    found = Counter(
        (part.op, part.stage, part.microbatch)
        for r in range(schedule.ranks)
        for i in schedule.instructions(r)
        for part in parts_of(i)
        if part.op in COMPUTE
    )
    assert set(found.values()) == {1}
    walked = {(s, m) for chain in schedule.flows for s in chain.stages for m in chain.microbatches}
    done = {op: {(s, m) for o, s, m in found if o is op} for op in (Op.F, Op.B, Op.I, Op.W)}
    assert done[Op.F] == walked
    assert done[Op.I] == done[Op.W]
    assert not done[Op.B] & done[Op.I]
    assert done[Op.B] | done[Op.I] == (set() if schedule.forward_only else walked)


@every_builder
@given(data=st.data())
def test_every_instruction_is_on_the_rank_of_its_stage(name, data):
    schedule = data.draw(cases(name)).schedule
    for rank in range(schedule.ranks):
        assert {
            schedule.placement[part.stage] for i in schedule.instructions(rank) for part in parts_of(i)
        } == {rank}


@every_builder
@given(data=st.data())
def test_ordered(name, data):
    """Ranks can take turns so that nothing is computed before what it consumes."""
    schedule = data.draw(cases(name)).schedule
    done = set()
    edges = [(a, b) for a, b in schedule.edges if not schedule.shift(a, b)]
    successor, predecessor = {b: a for a, b in edges}, dict(edges)
    back = {b: a for a, b in schedule.edges if (a, b) not in edges}
    for rank, step in linearize(schedule):
        for part in (p for i in schedule.programs[rank][step] if i.op in COMPUTE for p in (i.parts or (i,))):
            op, stage, m = part[:3]
            if op is Op.F:
                assert stage not in successor or (Op.F, successor[stage], m) in done
                assert stage not in back or not schedule.joins(m, -1) or (Op.F, back[stage], m - 1) in done
            elif op is Op.W:
                assert (Op.I, stage, m) in done
            else:
                assert (Op.F, stage, m) in done
                after = predecessor.get(stage)
                assert after is None or {(Op.B, after, m), (Op.I, after, m)} & done
            done.add((op, stage, m))


@every_builder
@given(data=st.data())
def test_proved(name, data):
    """Compute alone, and with communication under a queue per pair of ranks."""
    schedule = data.draw(cases(name)).schedule
    with_messages = lowered(schedule)
    assert check(schedule).digest == schedule.digest
    assert check(with_messages).digest == with_messages.digest


@every_builder
@given(data=st.data())
def test_builders_of_compute_write_no_communication_and_one_instruction_per_step(name, data):
    schedule = data.draw(cases(name)).schedule
    if name.startswith("deepspeed") or name == "data_parallel":
        assert schedule.ops & (COMMUNICATION | {Op.LOAD})
    else:
        assert schedule.ops <= COMPUTE
        assert all(len(step) <= 1 for program in schedule.programs for step in program)


@every_builder
@given(data=st.data())
def test_within_its_memory_bound(name, data):
    case = data.draw(cases(name))
    bound = PEAK[name](*case[1:])
    assert max(check(case.schedule).peak_activations) <= bound
    assert max(simulate(case.schedule, Costs(weight_share=1)).peak_activations) <= bound


@pytest.mark.parametrize("name", [n for n in ALL if not ALL[n](2, 4).forward_only])
@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_the_memory_bound_is_met(name, ranks):
    """With microbatches enough to reach it: the bound is not looser than it need be."""
    schedule = ALL[name](ranks, 4 * ranks)
    chunks = len(schedule.stages_of(0))
    assert max(check(schedule).peak_activations) == PEAK[name](ranks, 4 * ranks, chunks)


@pytest.mark.parametrize("name", IDLE)
@few(10)
@given(data=st.data())
def test_unit_cost_simulation_equals_the_formula(name, data):
    formula, holds = IDLE[name]
    case = data.draw(cases(name).filter(lambda c: holds(c.p, c.m)))
    idle = formula(case.p, case.v)
    timeline = simulate(lowered(case.schedule))
    assert set(timeline.idle) == {idle}
    if name in NO_BUBBLE_IN_SPAN:
        assert timeline.span == timeline.makespan - idle


@every_builder
@given(data=st.data())
def test_text_round_trip(name, data):
    """JSON gives the value back; CSV its instructions, a cell each."""
    schedule = data.draw(cases(name)).schedule
    for form in (schedule, lowered(schedule)):
        assert from_json(to_json(form)) == form
        again = from_csv(to_csv(form), form.name)
        assert [list(again.instructions(r)) for r in range(form.ranks)] == [
            list(form.instructions(r)) for r in range(form.ranks)
        ]
        assert (again.placement, again.flows) == (form.placement, form.flows)


def trained(schedule: Schedule, most: int, tied: Any = None) -> Schedule:
    """Compute, with all that a training step needs beside messages."""
    bare = compute_only(schedule)
    return insert_unshards(bare if bare.forward_only else reduce_early(append_tail(bare, tied=tied)), most)


def fewest(schedule: Schedule) -> int:
    """How many stages must be unsharded at once on some rank."""
    return max(
        len({p.stage for p in parts_of(i)}) for r in range(schedule.ranks) for i in schedule.instructions(r)
    )


@every_builder
@given(data=st.data())
def test_reductions_and_gathers_are_proved_in_any_order_of_the_passes(name, data):
    schedule = data.draw(cases(name)).schedule
    most = data.draw(st.integers(fewest(schedule), 4))
    form = trained(schedule, most, data.draw(st.sampled_from([None, True])))
    assert check(form).digest == form.digest
    check(place_communication(form))
    assert from_json(to_json(form)) == form
    again = from_csv(to_csv(form), form.name)
    assert [list(again.instructions(r)) for r in range(form.ranks)] == [
        list(form.instructions(r)) for r in range(form.ranks)
    ]
    bare = compute_only(schedule)
    assert remove_tail(remove_unshards(form)) == remove_tail(bare)
    assert insert_unshards(form, most) == form
    if not bare.forward_only:
        assert reduce_early(form) == form and append_tail(form) == form
        assert reduce_early(append_tail(insert_unshards(bare, most), tied=Op.REDUCE_TIED in form.ops)) == form


@every_builder
@given(data=st.data())
def test_every_stage_is_reduced_as_soon_as_its_gradients_are_there(name, data):
    schedule = trained(data.draw(cases(name)).schedule, 2)
    if schedule.forward_only:
        return
    for rank in range(schedule.ranks):
        row = [i for i in schedule.instructions(rank) if i.op not in SHARDING]
        for stage in schedule.stages_of(rank):
            own = [n for n, i in enumerate(row) if i.op in TAIL and i.stage == stage]
            assert [row[n].op for n in own] == [op for op in TAIL if op in schedule.ops]
            last = max(
                n for n, i in enumerate(row) if any(p.stage == stage and p.op in COMPUTE for p in parts_of(i))
            )
            if Op.REDUCE_TIED not in schedule.ops:
                assert not any(i.op in COMPUTE for i in row[last + 1 : own[0]])
            assert not any(i.op in COMPUTE for i in row[own[-1] :])


@every_builder
@given(data=st.data())
def test_no_more_stages_are_unsharded_than_allowed_and_the_next_is_fetched_ahead(name, data):
    bare = compute_only(data.draw(cases(name)).schedule)
    most = data.draw(st.integers(fewest(bare), 4))
    schedule = insert_unshards(bare, most)
    for rank in range(schedule.ranks):
        row = list(schedule.instructions(rank))
        there: set[int] = set()
        for n, instruction in enumerate(row):
            if instruction.op is Op.UNSHARD:
                assert instruction.stage not in there
                there.add(instruction.stage)
            elif instruction.op is Op.RESHARD:
                there.remove(instruction.stage)
            else:
                now = {p.stage for p in parts_of(instruction)}
                later = [
                    p.stage for i in row[n:] if i.op in COMPUTE for p in parts_of(i) if p.stage not in now
                ]
                assert now <= there and len(there) <= most
                assert not later or len(now) == most or later[0] in there
                assert there <= now | set(later)
        assert not there


@every_builder
@given(data=st.data())
def test_what_takes_no_time_changes_no_time(name, data):
    bare = compute_only(data.draw(cases(name)).schedule)
    form = trained(bare, 2)
    costs = Costs(forward=2, backward=5, overlapped=6, communication=1)
    with_tail, without = simulate(form, costs), simulate(bare, costs)
    for figure in ("makespan", "span", "bubble", "span_bubble", "idle", "peak_activations"):
        assert getattr(with_tail, figure) == getattr(without, figure)


@every_builder
@given(data=st.data())
def test_collectives_and_optimizer_steps_take_their_time(name, data):
    """The rule itself: one collective after the other, compute after the gather of its stage, STEP after its
    sums.
    """
    form = trained(data.draw(cases(name)).schedule, data.draw(st.integers(2, 4)))
    costs = Costs(
        2,
        1,
        3,
        unshard=data.draw(st.integers(0, 5)),
        reduce_tied=1,
        reduce_grad=data.draw(st.integers(0, 9)),
        step=2,
    )
    timeline = simulate(form, costs)
    assert (
        simulate(place_communication(form), costs).makespan
        == timeline.makespan
        >= simulate(compute_only(form), costs).makespan
    )
    for rank in range(form.ranks):
        free, lane, ready, summed = 0, 0, {}, {}
        for i, start, end in zip(
            form.instructions(rank), timeline.starts[rank], timeline.ends[rank], strict=True
        ):
            if i.op is Op.RESHARD:
                assert start == end == free
            elif i.op in COMPUTE:
                assert start >= max(free, *(ready[p.stage] for p in parts_of(i)))
                free = end
            elif i.op is Op.STEP:
                assert (start, end - start) == (max(free, summed[i.stage]), 2)
                free = end
            else:
                assert (start, end - start) == (max(free, lane), costs.of(i.op.lower(), i.stage))
                lane = (ready if i.op is Op.UNSHARD else summed)[i.stage] = end
    assert timeline.makespan == max(e for ends in timeline.ends for e in ends)


@every_builder
@given(data=st.data())
def test_the_same_arguments_give_the_same_digest(name, data):
    chosen = data.draw(arguments(name))
    digest = ALL[name](**chosen).digest
    assert ALL[name](**chosen).digest == digest
    assert ALL[name](**chosen | {"microbatches": chosen["microbatches"] + 2}).digest != digest


def test_digests_are_the_same_in_every_process():
    """Whatever the seed of Python's own hashes."""
    code = "from ppfunc.schedule import BUILDERS; print({n: f(2, 4).digest for n, f in BUILDERS.items()})"
    printed = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1] == f"{ {n: f(2, 4).digest for n, f in BUILDERS.items()} }\n"


@pytest.mark.parametrize("name", ACCEPTS)
def test_what_is_not_accepted_is_refused(name):
    """Every pair of counts either makes a schedule or is refused with the argument's name, as declared."""
    for p in range(1, 9):
        for m in range(1, 25):
            if ACCEPTS[name](p, m):
                assert ALL[name](p, m).ranks == p
            else:
                with pytest.raises(ValueError, match=r"^(ranks|microbatches) = \d+, expected .*: "):
                    ALL[name](p, m)
