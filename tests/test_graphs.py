"""Graphs of stages: several edges, copies of a stage, values that go to a rank once."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hypothesis import given, strategies as st

import ppfunc as pp
from ppfunc.schedule import Flow, check, place_communication, simulate
from ppfunc.schedule.planner.overview import _messages
from ppfunc.stage.tree import tree_leaves
from tests.graphs import DEALT, DIAMOND, in_order, random_graph
from tests.models import normal, same_bits
from tests.schedule.reference import edges_of
from tests.storages import LiveStorages

ENGINES = [pp.engines.graph, pp.engines.functional, pp.engines.eager]
WIDTH, ROWS = 3, 2
SEEDS = st.integers(0, 2**32)


def node(schedule, k):
    """A stage of the model that reads all that it gets, and sends its output and its skips."""
    skips = {schedule.model_stages[b] for a, b in schedule.skips if schedule.model_stages[a] == k}
    ends = {schedule.model_stages[s] for s in schedule.ends}
    onward = {schedule.model_stages[a] for f in schedule.flows for a, _ in f.pairs} | ends

    def fn(params, given):
        x, received = given if isinstance(given, pp.Received) else (given, {})
        x = x if isinstance(x, tuple) else (x,)
        h = sum((n + 1) * part for n, part in enumerate(x))
        h = h + sum((s + 1) * value.sin() for s, value in received.items() if value is not None)
        y = torch.tanh(h @ params["w"])
        return pp.Output(y if k in onward else (), skips={s: y * (s + 2) for s in skips} or None)

    return fn


def in_one_piece(schedule, params, x, target):
    """The weighted loss of all microbatches, by the edges of the schedule alone."""
    model, loss = schedule.model_stages, 0
    for m in range(schedule.microbatches):
        rows = slice(m * ROWS, (m + 1) * ROWS)
        flow = next(f for f in schedule.flows if m in f.microbatches)
        outputs = {}
        for s in flow.stages:
            before = [a for a in flow.stages if (a, s) in flow.pairs]
            h = sum((n + 1) * outputs[a] for n, a in enumerate(before)) if before else x[rows]
            for a, b in schedule.skips:
                if b == s and a in flow.stages:
                    h = h + (model[a] + 1) * (outputs[a] * (model[s] + 2)).sin()
            outputs[s] = torch.tanh(h @ params[model[s]]["w"])
        loss = loss + (outputs[flow.stages[-1]] - target[rows]).square().mean() / schedule.microbatches
    return loss


def problem(schedule):
    count = len(set(schedule.model_stages))
    params = {k: {"w": normal(WIDTH, WIDTH, seed=k)} for k in range(count)}
    x, target = (normal(ROWS * schedule.microbatches, WIDTH, seed=n) for n in (50, 51))
    return params, x, target


def expected(schedule, params, x, target):
    own = {k: {"w": p["w"].clone().requires_grad_()} for k, p in params.items()}
    loss = in_one_piece(schedule, own, x, target)
    grads = torch.autograd.grad(loss, [p["w"] for p in own.values()])
    return loss.detach(), dict(zip(own, grads, strict=True))


def stages_of(schedule):
    return [node(schedule, k) for k in range(len(set(schedule.model_stages)))]


def squared(y, target):
    return (y - target).square().mean()


@pytest.mark.parametrize("engine", ENGINES)
@given(SEEDS)
def test_gradients_of_any_graph_are_those_of_the_model_in_one_piece(engine, seed):
    schedule = random_graph(random.Random(seed), most=5)
    params, x, target = problem(schedule)
    step = pp.value_and_grad(stages_of(schedule), squared, schedule, engine=engine)
    loss, grads = step(params, x, target)
    wanted, by_stage = expected(schedule, params, x, target)
    torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-12)
    for k, grad in by_stage.items():
        torch.testing.assert_close(grads[k]["w"], grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "schedule",
    [
        pp.spread(pp.one_f_one_b(2, 4), microbatches=[0, 3]),
        pp.with_parts(pp.zbv(2, 3)),
        pp.with_parts(pp.spread(pp.zb_h1(2, 3), into=1)),
    ],
    ids=lambda schedule: schedule.name,
)
def test_an_encoder_in_the_bubbles_and_an_output_layer_in_parts_are_exact(schedule):
    params, x, target = problem(schedule)
    loss, grads = pp.value_and_grad(stages_of(schedule), squared, schedule)(params, x, target)
    wanted, by_stage = expected(schedule, params, x, target)
    torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-12)
    for k, grad in by_stage.items():
        torch.testing.assert_close(grads[k]["w"], grad, rtol=0, atol=1e-12)


def test_results_of_copies_are_in_the_order_of_their_microbatches():
    """Copies 1 and 2 of the last stage have every other microbatch."""
    flows = Flow((0, 2), (0, 3)), Flow((0, 1), range(1, 3))
    schedule = in_order((0, 0, 1), flows, replicas=((1, 2),))

    def last(w, x):
        return pp.Output(w * x, metrics={"sum": (w * x).sum()})

    x = torch.arange(4.0)
    stages, loss_fn = [lambda w, x: w * x, last], lambda y, t: (y.sum(), {"target": t})
    step = pp.value_and_grad(stages, loss_fn, schedule, has_aux=True, return_outputs=True)
    result = step({0: torch.tensor(2.0), 1: torch.tensor(3.0)}, x, x)
    assert result.outputs.tolist() == result.aux.metrics[1]["sum"].tolist() == (6 * x).tolist()
    assert result.aux.loss["target"].flatten().tolist() == x.tolist()


@given(SEEDS)
def test_a_rank_is_sent_what_it_lacks_and_nothing_twice(seed):
    schedule = place_communication(random_graph(random.Random(seed)))
    check(schedule)
    home, lacking = schedule.placement, set()
    for m in range(schedule.microbatches):
        for a, b, _ in edges_of(schedule, m):
            lacking |= {("F", a, home[b], m), ("B", b, home[a], m)} if home[a] != home[b] else set()
    sent = [i for program in schedule.programs for step in program for i in step if "SEND" in i.op]
    assert len(sent) == len(lacking) == _messages(schedule)
    assert Counter(i.op[-1] for i in sent) == Counter(kind for kind, *_ in lacking)


@given(SEEDS)
def test_simulated_times_are_those_of_a_slow_model(seed):
    schedule = random_graph(random.Random(seed))
    done = {}
    programs = [[i for step in program for i in step] for program in schedule.programs]
    free, at = [0] * schedule.ranks, [0] * schedule.ranks
    while any(at[r] < len(p) for r, p in enumerate(programs)):
        for rank, program in enumerate(programs):
            if at[rank] == len(program):
                continue
            i = program[at[rank]]
            edges = edges_of(schedule, i.microbatch)
            needs = {
                "F": [("F", a) for a, b, _ in edges if b == i.stage],
                "W": [("I", i.stage)],
            }.get(i.op, [("F", i.stage), *(("I", b) for a, b, _ in edges if a == i.stage)])
            if all((*need, i.microbatch) in done for need in needs):
                start = max([free[rank], *(done[*need, i.microbatch] for need in needs)])
                free[rank] = start + (2 if i.op == "B" else 1)
                done["I" if i.op == "B" else i.op, i.stage, i.microbatch] = free[rank]
                at[rank] += 1
    assert simulate(schedule).makespan == simulate(place_communication(schedule)).makespan == max(free)


def by_process(rank, size, seeds):
    """Of this rank, by seed: loss, gradients, predicted and measured bytes of a step."""
    found = []
    for seed in seeds:
        schedule = random_graph(random.Random(seed), ranks=size)
        params, x, target = problem(schedule)
        params = {k: params[k] for k in schedule.model_stages_of(rank)}
        here = [schedule.placement[s] for s in schedule.heads], [schedule.placement[s] for s in schedule.ends]
        batch = [part if rank in ranks else None for part, ranks in zip((x, target), here, strict=True)]
        with pp.P2P(mapped=False) as transport:
            step = pp.value_and_grad(stages_of(schedule), squared, schedule, transport)
            peak = step.lower(params, *batch).memory_analysis()[rank].peak
            loss, grads = step(params, *batch)
            given = [t for t in tree_leaves((params, batch)) if t is not None]
            with LiveStorages(given) as counted:
                step(params, *batch)
            whole = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in given}
        found.append((loss, grads, peak, sum(whole.values()) + counted.peak))
    return found


def same_in_processes(size, results, seeds):
    for n, seed in enumerate(seeds):
        schedule = random_graph(random.Random(seed), ranks=size)
        loss, grads = pp.value_and_grad(stages_of(schedule), squared, schedule)(*problem(schedule))
        for rank, of_rank in enumerate(results):
            mine, theirs, predicted, measured = of_rank[n]
            assert same_bits(mine, loss), (seed, rank)
            assert all(same_bits(theirs[k], grads[k]) for k in schedule.model_stages_of(rank)), (seed, rank)
            assert predicted == pytest.approx(measured, rel=0.05), (seed, rank)


def test_two_processes_give_the_same_bits_and_the_bytes_that_are_predicted(two):
    seeds = range(12)
    same_in_processes(2, two(by_process, seeds), seeds)


def test_four_processes_give_the_same_bits(four):
    seeds = range(20, 24)
    same_in_processes(4, four(by_process, seeds), seeds)


def steps_in_one_piece(schedule, params, batches, rate, clip):
    """The parameters after steps of plain SGD by a clipped gradient."""
    for x, target in batches:
        _, grads = expected(schedule, params, x, target)
        norm = torch.stack([g.norm() for g in grads.values()]).norm()
        factor = rate * min(1.0, clip / (float(norm) + 1e-6))  # as torch clips
        params = {k: {"w": p["w"] - factor * grads[k]} for k, p in params.items()}
    return params


def trained(rank, size):
    """The parameters of this rank after three steps, and what a checkpoint of them holds."""
    params, _, _ = problem(DEALT)
    batches = [(normal(8, WIDTH, seed=n), normal(8, WIDTH, seed=90 + n)) for n in range(3)]
    optimizer = pp.optim.chain(pp.optim.clip_by_global_norm(0.05), pp.optim.sgd(0.1))
    transport = pp.P2P() if size > 1 else None
    with pp.Trainer(stages_of(DEALT), squared, DEALT, optimizer, transport) as trainer:
        here = range(3) if size == 1 else DEALT.model_stages_of(rank)
        state = trainer.init({k: params[k] for k in here})
        for x, target in batches:
            state, _ = trainer.step(state, x, target if rank == size - 1 else None)
        return {k: tree["w"] for k, tree in state.params.items()}


def test_copies_of_a_stage_train_as_one(two):
    params, _, _ = problem(DEALT)
    batches = [(normal(8, WIDTH, seed=n), normal(8, WIDTH, seed=90 + n)) for n in range(3)]
    wanted = steps_in_one_piece(DEALT, params, batches, 0.1, 0.05)
    alone = trained(0, 1)
    for k, w in alone.items():
        torch.testing.assert_close(w, wanted[k]["w"], rtol=0, atol=1e-12)
    for by_rank in two(trained):
        assert all(same_bits(w, alone[k]) for k, w in by_rank.items())


def test_an_output_of_two_receivers_on_a_rank_travels_once():
    schedule = in_order((0, 1, 1, 0), (Flow((0, 1, 2, 3), range(1), DIAMOND),))
    step = pp.value_and_grad(stages_of(schedule), squared, schedule)
    program = step.lower(*problem(schedule)).as_text()
    number = ROWS * WIDTH * 8
    assert f"0SEND_F0>1({number} B)" in program and f"1RECV_F0({number} B)" in program
    assert f"1SEND_B0({number} B)" in program and f"2SEND_B0({number} B)" in program
