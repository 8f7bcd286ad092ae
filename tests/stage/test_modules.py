"""Modules as stages."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

import ppfunc as pp
from ppfunc.stage import StageError, eager, functional, graph, stage_from_module
from tests.models import squared
from tests.stage.conftest import every, through


def test_buffers_come_in_and_go_out_and_the_module_stays_as_it_is():
    module = nn.BatchNorm1d(2)
    fn, params, state = stage_from_module(module)
    x = torch.randn(8, 2)
    new = fn(params, x, state).state
    assert all(torch.equal(b, torch.zeros(2)) for b in (module.running_mean, state["running_mean"]))
    torch.testing.assert_close(new["running_mean"], 0.1 * x.mean(0))
    assert new["num_batches_tracked"] == 1 and state["num_batches_tracked"] == 0


def test_a_buffer_that_is_replaced_goes_out_too():
    class Count(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen = self.seen + 1
            return x * self.seen

    module = Count()
    fn, params, state = stage_from_module(module)
    out = fn(params, torch.ones(2), state)
    assert torch.equal(out.y, torch.ones(2)) and out.state["seen"] == 1
    assert module.seen == 0 and state["seen"] == 0


def test_tuples_are_positional_and_dictionaries_keywords():
    class Sum(nn.Module):
        def forward(self, a, b):
            return a + 2 * b

    fn, _, _ = stage_from_module(Sum())
    a, b = torch.ones(2), torch.full((2,), 3.0)
    assert torch.equal(fn({}, (a, b)), fn({}, {"b": b, "a": a}))
    assert torch.equal(fn({}, (a, b)), fn({}, a, {"b": b}))
    assert torch.equal(fn({}, (a, b)), fn({}, a, b))


def test_a_shared_parameter_is_listed_once_with_one_gradient():
    a, b = nn.Linear(3, 3, bias=False).double(), nn.Linear(3, 3, bias=False).double()
    b.weight = a.weight
    module = nn.Sequential(a, b)
    fn, params, _ = stage_from_module(module)
    x = torch.randn(2, 3, dtype=torch.float64)
    _, gparams, _ = through(graph(fn, (params, x)), params, x)
    (want,) = torch.autograd.grad(module(x).sum(), a.weight)
    torch.testing.assert_close(gparams, {"0.weight": want}, rtol=1e-12, atol=1e-12)


@every
def test_a_submodule_listed_twice_stays_as_it_is(engine):
    torch.manual_seed(0)
    layer, norm = nn.Linear(3, 3).double(), nn.BatchNorm1d(3).double()
    module = nn.Sequential(layer, norm, nn.Tanh(), layer, norm)
    alone = copy.deepcopy(module)
    own = {id(t): t.detach().clone() for t in (*module.parameters(), *module.buffers())}
    fn, params, state = stage_from_module(module)
    assert list(params) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    step = pp.value_and_grad([fn], squared, pp.gpipe(1, 2), engine=engine, has_aux=True)
    x, target = torch.randn(8, 3, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    for _ in range(2):
        result = step({0: params}, x, target, state={0: state})
        loss, aux, grads = result.loss, result.aux, result.grads
        assert all(torch.equal(t.detach(), own[id(t)]) for t in (*module.parameters(), *module.buffers()))
    want = sum(squared(alone(a), t) for a, t in zip(x.chunk(2), target.chunk(2), strict=True)) / 2
    torch.testing.assert_close(loss, want.detach(), rtol=1e-12, atol=1e-12)
    wanted = list(torch.autograd.grad(want, list(alone.parameters())))
    torch.testing.assert_close(list(grads[0].values()), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(aux.state[0], dict(alone.named_buffers()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "engine", [graph, graph(remat="full"), functional, eager], ids=["graph", "remat", "functional", "eager"]
)
@pytest.mark.parametrize("schedule", [pp.gpipe, pp.zb_h1])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layers_of_single_precision(engine, schedule, bidirectional):
    torch.manual_seed(0)
    module = nn.LSTM(4, 3, num_layers=2, bidirectional=bidirectional)
    fn, params, _ = stage_from_module(module)
    x, target = torch.randn(10, 2, 4), torch.randn(10, 2, 6 if bidirectional else 3)
    first = lambda p, x: fn(p, x)[0]  # noqa: E731
    step = pp.value_and_grad([first], squared, schedule(1, 2), engine=engine, argnums=(0, 1))
    x.requires_grad_()
    result = step({0: params}, x, target)
    loss, grads, gx = result.loss, result.grads, result.input_grads
    want = sum(squared(module(a)[0], t) for a, t in zip(x.chunk(2), target.chunk(2), strict=True)) / 2
    wanted = torch.autograd.grad(want, [*module.parameters(), x])
    torch.testing.assert_close(loss, want.detach())
    torch.testing.assert_close([*grads[0].values(), gx], list(wanted))
    assert not any(t.requires_grad for t in (loss, gx, *grads[0].values()))


class Caching(nn.Module):
    """Keeps what it makes wherever it can: attributes, buffers, containers, flags."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("table", None, persistent=False)
        self.positions, self.tables, self.seen, self.lengths = None, {}, [], {0}

    def forward(self, x):
        if self.positions is None:
            self.positions = torch.arange(3.0).cos()
            self.table = self.positions + 1
            self.tables[len(x)] = self.linear.weight.sin()
            self.extra = True
        self.seen.append(x)
        self.lengths.add(len(x))
        self.linear.training = False
        return self.linear(x) * self.positions * self.table @ self.tables[len(x)]


@every
def test_what_a_module_keeps_in_a_call_is_gone_afterwards(engine):
    torch.manual_seed(0)
    module, alone = Caching(), Caching()
    alone.load_state_dict(module.state_dict())
    module.tables["mine"] = kept = torch.ones(1)
    fn, params, _ = stage_from_module(module, constants=True)
    step = pp.value_and_grad([fn], squared, pp.gpipe(1, 2), engine=engine)
    for length in (4, 5):
        x, target = torch.randn(2 * length, 3), torch.randn(2 * length, 3)
        loss, grads = step({0: params}, x, target)
        pairs = zip(x.chunk(2), target.chunk(2), strict=True)
        want = sum(squared(copy.deepcopy(alone)(a), t) for a, t in pairs) / 2
        torch.testing.assert_close(loss, want.detach())
        assert type(grads[0]["linear.weight"]) is torch.Tensor
    assert module.positions is module.table is None
    assert module.seen == [] and module.lengths == {0} and not hasattr(module, "extra")
    assert list(module.tables) == ["mine"] and module.tables["mine"] is kept
    assert module.linear.training and "table" in module._buffers


class Scaled(nn.Module):
    """Twice as much in training; with a table that it only reads."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0]))

    def forward(self, x):
        return self.linear(x) * self.mask * (2 if self.training else 1)


WRAPPED = {
    "partial": lambda fn: pp.value_and_grad([functools.partial(fn)], squared, pp.gpipe(1, 2)),
    "layers": lambda fn: pp.value_and_grad(
        pp.stages_from_layers([fn], pp.parallel.Partition((0, 1))), squared, pp.gpipe(1, 2)
    ),
    "ensemble": lambda fn: pp.value_and_grad(*pp.ensemble([fn], squared), pp.gpipe(1, 2), loss_shape=(1,)),
    "jvp": lambda fn: pp.jvp([fn], squared, pp.gpipe(1, 2)),
    "hvp": lambda fn: pp.hvp([fn], squared, pp.gpipe(1, 2)),
    "per_sample_grad": lambda fn: pp.per_sample_grad([fn], squared, pp.gpipe(1, 2), samples=4),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_the_mode_is_followed_through_what_is_made_of_a_stage(kind):
    torch.manual_seed(0)
    module = Scaled()
    fn, params, state = pp.stage_from_module(module, constants=True)
    assert state == {}
    if kind == "layers":
        params = (params,)
    if kind == "ensemble":
        params = {k: t[None] for k, t in params.items()}
    tangents = [{0: None}] if kind in ("jvp", "hvp") else []
    x, target = torch.randn(8, 3), torch.zeros(8, 3)
    step, losses = WRAPPED[kind](fn), []
    for training in (True, False, True):
        module.train(training)
        made = step({0: params}, *tangents, x, target)
        first = made[0] if isinstance(made[0], torch.Tensor) else made[0][0]
        losses.append(first.flatten()[0])
    torch.testing.assert_close(losses[0], 4 * losses[1])
    assert torch.equal(losses[0], losses[2])


def test_a_module_that_writes_into_a_constant_is_refused():
    fn, params, _ = pp.stage_from_module(nn.BatchNorm1d(3), constants=True)
    with pytest.raises(StageError, match="writes into"):
        graph(fn, (params, torch.randn(4, 3)))


def test_a_module_with_buffers_may_return_an_output():
    class Losing(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            y = self.norm(x)
            return pp.Output(y, loss=100 + y.sum(), metrics=y.detach().mean())

    fn, params, state = pp.stage_from_module(Losing())
    step = pp.value_and_grad([fn], squared, pp.gpipe(1, 2), has_aux=True)
    result = step({0: params}, torch.randn(8, 3), torch.zeros(8, 3), state={0: state})
    loss, aux = result.loss, result.aux
    assert loss > 90
    assert aux.metrics[0].shape == (2,)
    assert aux.state[0]["norm.num_batches_tracked"] == 2


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match="expected a torch.nn.Module"):
        stage_from_module(squared)
    said = "got RecursiveScriptModule, .* give the module from before it was scripted"
    with pytest.raises(TypeError, match=said):
        stage_from_module(torch.jit.script(nn.Linear(2, 2)))


def test_a_lazy_parameter_is_named():
    module = nn.Sequential(nn.Linear(3, 2), nn.LazyLinear(2))
    said = r"1\.weight is not initialised, .* run the module once on an example first"
    with pytest.raises(ValueError, match=said):
        stage_from_module(module)
    with pytest.raises(ValueError, match="running_mean is not initialised"):
        stage_from_module(nn.LazyBatchNorm1d(affine=False))
    module(torch.zeros(1, 3))
    assert list(stage_from_module(module).params) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_buffer_that_is_a_parameter_by_another_name_stays_one():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3, bias=False)
            self.register_buffer("b", self.a.weight)

        def forward(self, x):
            return self.a(x) @ self.b

    module, x = Tied(), torch.randn(2, 3)
    fn, params, state = stage_from_module(module)
    assert (sorted(params), state) == (["a.weight"], {})
    _, gparams, _ = through(graph(fn, (params, x)), params, x)
    (want,) = torch.autograd.grad(module(x).sum(), [module.a.weight])
    torch.testing.assert_close(gparams["a.weight"], want)


class ReadsABuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("scale", torch.tensor([2.0, 3.0]))

    def forward(self, x):
        return self.layer(x) * self.scale


@every
def test_buffers_that_are_only_read_need_no_state(engine):
    module = ReadsABuffer()
    fn, params, _ = stage_from_module(module)
    step = pp.value_and_grad([fn], lambda y, t: (y * t).sum(), pp.gpipe(1, 2), engine=engine)
    x, t = torch.randn(4, 2), torch.randn(4, 2)
    loss, grads = step({0: params}, x, t)
    want = (module(x) * t).sum() / 2
    torch.testing.assert_close(loss, want.detach())
    torch.testing.assert_close(grads[0]["layer.weight"], torch.autograd.grad(want, module.layer.weight)[0])


@every
def test_buffers_that_are_written_need_a_state_in_training_and_none_in_evaluation(engine):
    module = nn.BatchNorm1d(2)
    fn, params, _ = stage_from_module(module.eval())
    x = torch.randn(4, 2)
    torch.testing.assert_close(engine(fn, (params, x)).forward(params, x)[0], module(x).detach())
    module.train()
    with pytest.raises(StageError, match="has the buffers running_mean, .* give it to the step, state="):
        engine(fn, (params, x))
    assert torch.equal(module.running_mean, torch.zeros(2)) and module.num_batches_tracked == 0


def test_a_call_by_hand_that_writes_into_a_buffer_without_a_state_is_refused():
    fn, params, state = stage_from_module(nn.BatchNorm1d(2))
    said = "has written into its buffer num_batches_tracked, and was given no state"
    with pytest.raises(ValueError, match=said):
        fn(params, torch.randn(4, 2))
    with pytest.raises(ValueError, match="got a state with running_mean; the module has the buffers"):
        fn(params, torch.randn(4, 2), {"running_mean": state["running_mean"]})


def test_a_tuple_or_a_mapping_can_be_one_argument():
    class Pair(nn.Module):
        def forward(self, pair, more):
            return pair[0] + more["b"]

    a, b = torch.ones(2), torch.full((2,), 3.0)
    fn, _, _ = stage_from_module(Pair())
    assert torch.equal(fn({}, ((a, a),), ({"b": b},)), a + b)
    with pytest.raises(TypeError):
        fn({}, (a, a), {"b": b})


def test_hooks_and_layers_that_change_after_the_first_step_are_followed():
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), torch.randn(4, 3)
    fn, params, _ = stage_from_module(module)
    step = pp.evaluate([fn], None, pp.gpipe(1, 2), return_outputs=True)
    assert torch.equal(step({0: params}, x), module(x))
    handle = module[2].register_forward_pre_hook(lambda module, args: (2 * args[0],))
    assert torch.equal(step({0: params}, x), module(x))
    handle.remove()
    module[1] = nn.ReLU()
    assert torch.equal(step({0: params}, x), module(x))
    assert step.cache_info().misses == 3
