"""What holds for any batch, any schedule and any number of threads: numbers of a plain loop, and memory of
one's own.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, strategies as st

import ppfunc as pp
from ppfunc.schedule import Op, remove_tail
from ppfunc.stage.tree import tree_leaves, tree_map
from ppfunc.testing import schedules
from tests.builders import BUILDERS
from tests.conftest import few
from tests.models import normal, same_bits, squared

D = 3
ENGINES = {"graph": pp.engines.graph, "functional": pp.engines.functional, "eager": pp.engines.eager}
TRAINING = [name for name, build in BUILDERS.items() if not build(2, 4).forward_only]
engines = st.sampled_from(list(ENGINES))


class Ragged(NamedTuple):
    """A schedule, and microbatches of different sizes, some of which have an auxiliary loss or metrics.

    Args:
        rows: number of rows of each microbatch.
        losing, measured: for each stage, the numbers of rows with which it returns a loss or metrics.
        weights: of the losses.
    """

    schedule: pp.Schedule
    engine: str
    rows: list[int]
    losing: list[set[int]]
    measured: list[set[int]]
    weights: list[float]


@st.composite
def ragged(draw: st.DrawFn) -> Ragged:
    schedule = remove_tail(draw(schedules(TRAINING, max_ranks=4, max_microbatches=6, max_chunks=2)))
    stages, m = len(set(schedule.model_stages)), schedule.microbatches
    some = st.lists(st.sets(st.integers(1, 3)), min_size=stages, max_size=stages)
    numbers = st.floats(-2, 2, allow_nan=False, width=16)
    return Ragged(
        schedule,
        draw(engines),
        draw(st.lists(st.integers(1, 3), min_size=m, max_size=m)),
        draw(some),
        draw(some),
        draw(st.lists(numbers, min_size=m, max_size=m)),
    )


def stage_of(case: Ragged, s: int) -> Any:
    """A stage with what it returns beside its activation; the number of rows decides."""

    def stage(params, x, state=None):
        y = torch.tanh(x @ params["w"])
        return pp.Output(
            y,
            loss=y.square().sum() * params["scale"] if len(x) in case.losing[s] else None,
            metrics={"mean": y.mean(), "rows": y[0] * len(x)} if len(x) in case.measured[s] else None,
            state=None if state is None else state / 2 + y.detach().sum(),
        )

    return stage


def forwards_of(schedule: pp.Schedule, stage: int) -> list[int]:
    """The microbatches of a stage in the order in which it runs them."""
    found = (p for i in schedule.instructions(schedule.placement[stage]) for p in (i.parts or (i,)))
    return [p.microbatch for p in found if p.op is Op.F and p.stage == stage]


def loop(case: Ragged, stages: Any, params: Any, inputs: Any, targets: Any, state: Any) -> Any:
    """Loss, metrics and state without a pipeline, one microbatch and stage after the other."""
    total, metrics = torch.zeros((), dtype=torch.float64), [[] for _ in stages]
    passed: dict[tuple[int, int], torch.Tensor] = {}
    after = dict(state)
    for m, x in enumerate(inputs):
        for s, fn in enumerate(stages):
            out = fn(params[s], x)
            passed[s, m], x = x, out.y
            metrics[s].append(tree_map(torch.Tensor.detach, out.metrics))
            total = total if out.loss is None else total + case.weights[m] * out.loss
        total = total + case.weights[m] * squared(x, targets[m])
    for s in state:
        for m in forwards_of(case.schedule, s):
            after[s] = stages[s](params[s], passed[s, m], after[s]).state.detach()
    return total, metrics, after


@pytest.mark.filterwarnings("ignore:.*nothing depends on")
@few(12)
@given(ragged())
def test_ragged_microbatches_are_those_of_a_plain_loop(case):
    """Loss, gradients, metrics and state, whatever some microbatches have and others have not."""
    count, m = len(case.losing), case.schedule.microbatches
    params = {s: {"w": normal(D, D, seed=s), "scale": normal(1, seed=s)[0]} for s in range(count)}
    inputs, targets = ([normal(n, D, seed=10 * k + i) for i, n in enumerate(case.rows)] for k in (1, 2))
    state = {} if case.schedule.replicas else {0: normal(1)[0]}
    stages = [stage_of(case, s) for s in range(count)]
    step = pp.value_and_grad(stages, squared, case.schedule, engine=ENGINES[case.engine], has_aux=True)
    result = step(
        params, pp.Microbatches(inputs), pp.Microbatches(targets), loss_weights=case.weights, state=state
    )
    loss, aux, grads = result.loss, result.aux, result.grads

    leaf = tree_map(lambda t: t.clone().requires_grad_(), params)
    value, metrics, after = loop(case, stages, leaf, inputs, targets, state)
    value.backward()
    want = tree_map(lambda t: torch.zeros_like(t) if t.grad is None else t.grad, leaf)
    torch.testing.assert_close(loss, value.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(aux.state, after, rtol=1e-12, atol=1e-12)
    assert set(aux.metrics) == {s for s in range(count) if any(row is not None for row in metrics[s])}
    for s, found in aux.metrics.items():
        rows = (
            list(found)
            if isinstance(found, pp.Microbatches)
            else [tree_map(lambda t, i=i: t[i], found) for i in range(m)]
        )
        torch.testing.assert_close(rows, metrics[s], rtol=1e-12, atol=1e-12)


class Call(NamedTuple):
    """Numbers that make the arguments of one call."""

    seed: int
    rows: int
    apart: bool


calls = st.builds(Call, st.integers(0, 3), st.integers(1, 2), st.booleans())


@few(8)
@given(
    engines,
    schedules(["1f1b", "zbv", "dualpipe"], max_ranks=2, max_microbatches=4),
    st.lists(st.lists(calls, min_size=1, max_size=6), min_size=2, max_size=4),
)
def test_one_step_function_in_threads_gives_what_it_gives_in_one(engine, schedule, work):
    """Each thread has its own values and forms; all call at once, with the first call, which traces, among
    them.
    """
    count, m = len(set(schedule.model_stages)), schedule.microbatches

    def make():
        stages = [lambda p, x: pp.Output(torch.tanh(x @ p), metrics=x.mean())] * count
        return pp.value_and_grad(stages, squared, schedule, engine=ENGINES[engine], has_aux=True)

    def arguments(call):
        params = {s: normal(D, D, seed=call.seed + s) for s in range(count)}
        batches = [normal(m * call.rows, D, seed=call.seed + n) for n in (7, 8)]
        return params, *(pp.microbatch(batch, m) if call.apart else batch for batch in batches)

    alone, step = make(), make()
    want = {call: alone(*arguments(call)) for call in {call for own in work for call in own}}
    failed, start = [], threading.Barrier(len(work))

    def run(own):
        try:
            start.wait()
            for call in own:
                if not same_bits(step(*arguments(call)), want[call]):
                    failed.append(call)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(own,)) for own in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def bias(p, x):
    return x + p["a"] + p["b"]


def swap(p, x):
    return p["a"] * x.flip(0)


def same(p, x):
    return x


def constant(p, x):
    return p["a"].expand(len(x), D)


def telling(p, x):
    """Metrics that are the input, the parameters, views of them, and each other."""
    y = x + p["a"]
    return pp.Output(y, metrics={"x": x, "y": y, "again": y, "a": p["a"], "view": p["b"][:1]})


KINDS = {fn.__name__: fn for fn in (bias, swap, same, constant, telling)}
LOSSES = {"product": lambda y, t: (y * t).sum(), "squared": squared, "first": lambda y, t: y[0, 0]}


def memory(tree: Any) -> list[int]:
    """Where the memory of every leaf begins."""
    return [t.untyped_storage().data_ptr() for t in tree_leaves(tree)]


class Sharing(NamedTuple):
    """Stages that pass on what they are given, and the form of what goes in."""

    kinds: list[str]
    loss: str
    engine: str
    microbatches: int
    apart: bool
    per_microbatch: bool
    stateful: bool


sharing = st.builds(
    Sharing,
    st.lists(st.sampled_from(list(KINDS)), min_size=2, max_size=2),
    st.sampled_from(list(LOSSES)),
    engines,
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


def owned(results: Any, arguments: Any) -> None:
    """No result shares memory with an argument or another result."""
    given, made = memory(arguments), memory(results)
    assert len(set(made)) == len(made)
    assert not set(made) & set(given)


@pytest.mark.filterwarnings("ignore:.*nothing depends on")
@pytest.mark.parametrize("builder", [pp.gpipe, pp.zb_h1])
@few(10)
@given(sharing)
def test_results_belong_to_the_caller(builder, case):
    m, schedule = case.microbatches, builder(2, case.microbatches)
    zeros = torch.zeros(2, D)
    params = {s: {"a": zeros[0].clone(), "b": zeros[0].clone()} for s in range(2)}
    inputs, targets = torch.ones(2 * m, D), torch.ones(2 * m, D)
    if case.apart:
        inputs, targets = (
            pp.Microbatches([row.clone() for row in batch.chunk(m)]) for batch in (inputs, targets)
        )
    stages = [KINDS[kind] for kind in case.kinds]
    given: dict[str, Any] = {}
    if case.stateful:  # one part of it changes, one does not, and both are told
        first = stages[0]

        def passing(p, x, state):
            out = first(p, x)
            out = out if isinstance(out, pp.Output) else pp.Output(out)
            return out._replace(state={"kept": state["kept"], "count": state["count"] + 1})

        stages[0] = passing
        given["state"] = {0: {"kept": torch.ones(2), "count": torch.zeros(1)}}
    engine = ENGINES[case.engine]
    train = pp.value_and_grad(
        stages,
        LOSSES[case.loss],
        schedule,
        engine=engine,
        argnums=(0, 1),
        has_aux=True,
        per_microbatch=case.per_microbatch,
    )
    evaluate = pp.evaluate(
        stages, LOSSES[case.loss], schedule, engine=engine, return_outputs=True, has_aux=True
    )
    for step in (train, evaluate):
        for _ in range(2):
            results = step(params, inputs, targets, **given)
            owned(results, (params, inputs, targets, given))
