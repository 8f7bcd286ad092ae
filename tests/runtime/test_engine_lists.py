"""Each stage has an engine of its own where it needs one, the last with the loss."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ppfunc as pp
from ppfunc.stage import StageError, eager, functional, graph
from ppfunc.stage.program import Output
from tests.models import squared

ROWS, T, D = 8, 6, 4


def ctc(y, target):
    lengths = torch.full((len(y),), T), torch.full((len(y),), 2)
    return F.ctc_loss(y.log_softmax(-1).transpose(0, 1), target, *lengths)


def ctc_with_aux(y, target):
    return ctc(y, target), {"right": (y.argmax(-1)[:, :2] == target).sum()}


@pytest.fixture
def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    return model, torch.randn(ROWS, T, D, dtype=torch.float64), torch.randint(1, 5, (ROWS, 2))


def reference(model, loss_fn, x, t, m=4):
    model.zero_grad()
    loss = sum(loss_fn(model(a), b) for a, b in zip(x.chunk(m), t.chunk(m), strict=True)) / m
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def require_as_reference(result, model, loss_fn, x, t):
    loss, grads = reference(model, loss_fn, x, t)
    torch.testing.assert_close(result[0], loss)
    torch.testing.assert_close({n: g for tree in result[1].values() for n, g in tree.items()}, grads)


def by_values(y, target):
    return F.cross_entropy(y[target > 1], target[target > 1])


@pytest.mark.parametrize("schedule", [pp.one_f_one_b(2, 4), pp.zb_h1(2, 4)], ids=["1f1b", "zb_h1"])
@pytest.mark.parametrize("engine", [functional, eager])
@pytest.mark.parametrize("loss_fn", [ctc, by_values])
def test_a_list_leaves_the_first_stages_on_the_graph_engine(problem, schedule, engine, loss_fn):
    model, x, t = problem
    if loss_fn is by_values:
        x, t = x[:, 0], t[:, 0]
    parts = pp.split(model, x[:2], at=["2"])
    step = pp.value_and_grad(parts, loss_fn, schedule, engine=[graph, engine])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require_as_reference(step(parts.params, x, t), model, loss_fn, x, t)
    programs = step._last.compiled.programs
    assert [hasattr(programs[stage, 0].flat.backward, "recipe") for stage in (0, 1)] == [True, False]


@pytest.mark.parametrize("loss_fn", [ctc, by_values])
def test_a_refused_loss_names_the_list_that_serves_it(problem, loss_fn):
    model, x, t = problem
    if loss_fn is by_values:
        x, t = x[:, 0], t[:, 0]
    parts, schedule = pp.split(model, x[:2], at=["2"]), pp.one_f_one_b(2, 4)
    trainer = pp.Trainer(parts, loss_fn, schedule, pp.optim.sgd(0.1))
    for step in (
        partial(pp.value_and_grad(parts, loss_fn, schedule), parts.params),
        partial(pp.evaluate(parts, loss_fn, schedule), parts.params),
        partial(trainer.step, trainer.init(parts.params)),
    ):
        with pytest.raises(
            StageError, match=r"^stage 1: .* depend on the values .* engine=\[graph, graph, functional\]"
        ):
            step(x, t)


@pytest.mark.parametrize("part", ["stage", "loss"])
def test_what_raises_once_while_it_is_traced_is_traced_again_by_the_next_call(part):
    calls = []

    def called(name):
        calls.append(name)
        if name == part and calls.count(name) == 2:  # the first is the evaluation
            raise ConnectionError("busy")

    def stage(params, x):
        called("stage")
        return x * params

    def loss(y, target):
        called("loss")
        return squared(y, target)

    step = pp.value_and_grad([stage], loss, pp.gpipe(1, 2))
    args = {0: torch.ones(D)}, torch.randn(ROWS, D), torch.randn(ROWS, D)
    with pytest.raises(StageError, match="ConnectionError.*busy"):
        step(*args)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(step(*args)[0], squared(args[1], args[2]))
    assert hasattr(step._last.compiled.programs[0, 0].flat.backward, "recipe")


def test_a_trainer_takes_one_and_aux_comes_back(problem):
    model, x, t = problem
    parts = pp.split(model, x[:2], at=["2"])
    schedule = pp.one_f_one_b(2, 4)
    trainer = pp.Trainer(parts, ctc, schedule, pp.optim.sgd(0.1), engine=[graph, functional])
    state = trainer.init(parts.params)
    after, metrics = trainer.step(state, x, t)
    loss, grads = reference(model, ctc, x, t)
    torch.testing.assert_close(metrics.loss, loss)
    torch.testing.assert_close(
        after.params[0]["0.weight"], parts.params[0]["0.weight"] - 0.1 * grads["0.weight"]
    )
    torch.testing.assert_close(trainer.evaluate(state, x, t), loss)
    step = pp.value_and_grad(parts, ctc_with_aux, schedule, engine=[graph, eager], has_aux=True)
    result = step(parts.params, x, t)
    require_as_reference((result.loss, result.grads), model, ctc, x, t)
    want = (model(x).argmax(-1)[:, :2] == t).sum()
    assert "right" in str(result.aux) and want in [
        leaf.sum() for leaf in torch.utils._pytree.tree_leaves(result.aux) if isinstance(leaf, torch.Tensor)
    ]


def test_losses_metrics_states_and_outputs_of_the_last_stage_are_those_of_any_engine():
    torch.manual_seed(0)
    w, x, t = torch.randn(D, D), torch.randn(ROWS, D), torch.randn(ROWS, D)

    def last(params, x, state):
        y = (x @ params).tanh()
        return Output(y, loss=y.square().mean(), metrics={"mean": y.mean()}, state=state + y.sum())

    args = ({0: w}, x, t)
    results = []
    for engine in (graph, functional, eager):
        step = pp.value_and_grad([last], squared, pp.gpipe(1, 4), engine=[engine], has_aux=True)
        looks = pp.evaluate(
            [last], squared, pp.gpipe(1, 4), engine=[engine], return_outputs=True, has_aux=True
        )
        results.append((step(*args, state={0: torch.zeros(())}), looks(*args, state={0: torch.zeros(())})))
    for result, looked in results[1:]:
        torch.testing.assert_close(result.loss, results[0][0].loss)
        torch.testing.assert_close(result.grads, results[0][0].grads)
        torch.testing.assert_close(result.aux.metrics, results[0][0].aux.metrics)
        torch.testing.assert_close(result.aux.state, results[0][0].aux.state)
        torch.testing.assert_close(looked.outputs, results[0][1].outputs)


def test_what_is_no_engine_is_refused_and_a_fault_names_whose_it_is():
    with pytest.raises(
        TypeError, match=r"engine\[1\]: got 'functional' of type str, expected ppfunc.engines"
    ):
        pp.value_and_grad([squared] * 2, squared, pp.gpipe(2, 4), engine=[graph, "functional"])

    def looks(params, x):
        return params * x if x.sum() > 0 else x

    x = torch.randn(ROWS, D)
    with pytest.raises(StageError, match="stage 0: its control flow"):
        pp.value_and_grad([looks], squared, pp.gpipe(1, 4))({0: torch.ones(D)}, x, x)
