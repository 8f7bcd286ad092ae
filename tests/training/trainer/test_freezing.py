"""Freeze parameters, by their modules or by a mask: said once when a trainer is made, refused by name
later.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ppfunc as pp
from ppfunc.runtime.ports.protocols import Collective
from ppfunc.stage.layout import local
from ppfunc.stage.tree import tree_leaves
from tests.models import new_trainer, normal, squared
from tests.sharded_models import full

FROZEN = [(), (0,), (0, 1), (1,), (0, 1, 2)]  # the stages that are frozen, trainer after trainer


def layers(count=3, width=4):
    torch.manual_seed(0)
    return [nn.Linear(width, width).double() for _ in range(count)]


def by_torch(layers, batches):
    """Parameters after each step of torch, in which what is frozen has no gradient, and does not decay."""
    own, found = [p for layer in layers for p in layer.parameters()], []
    for frozen, (x, y) in zip(FROZEN, batches, strict=True):
        for n, layer in enumerate(layers):
            layer.requires_grad_(n not in frozen)
        made = x
        for layer in layers:
            made = torch.tanh(layer(made))
        loss = squared(made, y)
        free = [p for p in own if p.requires_grad]
        grads = torch.autograd.grad(loss, free) if free else ()
        with torch.no_grad():
            for p, g in zip(free, grads, strict=True):
                p -= 0.1 * (g + 0.5 * p)
        found.append([p.detach().clone() for p in own])
    return found


def stage_of(layer):
    fn, params, _ = pp.stage_from_module(layer)

    @functools.wraps(fn)
    def stage(p, x):
        return torch.tanh(fn(p, x))

    return stage, {name: p.clone() for name, p in params.items()}


def freezing(rank, size, schedule, engine, shape=None, shard="none"):
    """Train with another trainer for every set of frozen stages, each of which goes on with the state."""
    model, batches = layers(), [(normal(8, 4, seed=n), normal(8, 4, seed=50 + n)) for n in range(len(FROZEN))]
    wanted, model = by_torch(model, batches), layers()
    mesh = None if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp"))
    pipe, data = (rank, 0) if mesh is None else (mesh.get_local_rank("pp"), mesh.get_local_rank("dp"))
    ranks = 1 if size == 1 else size if mesh is None else shape[0]
    placement = [0] * 3 if ranks == 1 else [0, 1, 1]
    programs = [
        [
            *(pp.schedule.F(s, m) for m in range(4) for s in range(3) if placement[s] == r),
            *(pp.schedule.B(s, m) for m in range(4) for s in (2, 1, 0) if placement[s] == r),
        ]
        for r in range(ranks)
    ]
    build = pp.schedule.single_chain("by hand", placement=placement, microbatches=4, programs=programs)
    build = pp.schedule.split_backward(build) if schedule == "split" else build
    mine = [s for s in range(3) if placement[s] == (pipe if ranks > 1 else 0)]
    made = {s: stage_of(layer) for s, layer in enumerate(model) if s in mine}
    stages = [made[s][0] if s in made else None for s in range(3)]
    half = slice(None) if mesh is None else slice(4 * data, 4 * data + 4)
    with (
        pp.InProcess()
        if size == 1
        else pp.P2P(
            timeout=30,
            **({} if mesh is None else {"mesh": mesh, "axes": pp.Axes("pp", "dp"), "shard": shard}),
        ) as transport
    ):
        state = None
        for n, (frozen, (x, y)) in enumerate(zip(FROZEN, batches, strict=True)):
            for s in mine:
                model[s].requires_grad_(s not in frozen)
            optimizer = pp.optim.sgd(0.1, weight_decay=0.5)
            options = {"transport": transport, "engine": getattr(pp.engines, engine)}
            trainer = new_trainer(stages, squared, build, optimizer, **options)
            state = state or trainer.init({s: made[s][1] for s in mine})
            state, _ = trainer.step(state, x[half], y[half])
            for s in mine:
                for p, want in zip(full(state.params[s]).values(), wanted[n][2 * s : 2 * s + 2], strict=True):
                    torch.testing.assert_close(p, want, rtol=1e-12, atol=1e-12, msg=str((n, s)))


@pytest.mark.parametrize("engine", ["graph", "functional", "eager"])
def test_stages_are_frozen(engine):
    freezing(0, 1, "whole", engine)


@pytest.mark.parametrize(
    "schedule, engine", [("whole", "graph"), ("split", "graph"), ("whole", "functional"), ("whole", "eager")]
)
def test_stages_are_frozen_over_processes(two, schedule, engine):
    two(freezing, schedule, engine)


@pytest.mark.parametrize("shard", ["optimizer", "params"])
def test_stages_are_frozen_over_a_mesh(four, shard):
    four(freezing, "whole", "graph", (2, 2), shard)


@pytest.mark.parametrize("wrapped", ["fn", "wraps", "plain"])
@pytest.mark.parametrize("stepped", [False, True])
def test_a_module_that_changes_its_mind_is_refused_by_name(wrapped, stepped):
    """A step went on with the programs of before, or ran twice; a plain function around that of the module
    hid the change, and where it was frozen from the start weight decay would have acted on it.
    """
    module = nn.Linear(3, 3).double()
    fn, params, _ = pp.stage_from_module(module)
    around = {"fn": fn, "wraps": functools.wraps(fn)(lambda p, x: fn(p, x)), "plain": lambda p, x: fn(p, x)}
    x, y = normal(4, 3), normal(4, 3, seed=1)
    if wrapped == "plain" and not stepped:
        return  # the step function learns of the module when it is traced
    step = pp.value_and_grad([around[wrapped]], squared, pp.gpipe(1, 2))
    trainer = pp.Trainer([around[wrapped]], squared, pp.gpipe(1, 2), pp.optim.adamw(0.1))
    state = trainer.init({0: params})
    if stepped:
        step({0: params}, x, y)
        trainer.step(state, x, y)
    lowered = step.lower({0: params}, x, y).compile() if stepped else None
    module.weight.requires_grad_(False)
    for call in (lambda: step({0: params}, x, y), lambda: trainer.step(state, x, y)):
        with pytest.raises(ValueError, match=r"stages\[0\]: weight .*was trained .* and is frozen"):
            call()
    if lowered is not None:
        with pytest.raises(ValueError, match="was trained"):
            lowered({0: params}, x, y)
    trainer.evaluate(state, x, y)  # which takes no gradients
    module.weight.requires_grad_(True)
    step({0: params}, x, y)
    trainer.step(state, x, y)


@pytest.mark.parametrize("more", [{"weight": torch.ones(3, 3).double()}, {}])
def test_wraps_around_a_frozen_module_with_other_parameters_is_refused(more):
    """A leaf of the wrapper's own that was called as the frozen one was frozen with it, without a word."""
    module = nn.Linear(3, 3).double()
    module.weight.requires_grad_(False)
    fn, params, _ = pp.stage_from_module(module)

    @functools.wraps(fn)
    def stage(p, x):
        y = fn(p["inner"], x)
        return y @ p["weight"] if more else y

    given, schedule = {0: {"inner": params, **more}}, pp.gpipe(1, 2)
    told = (
        r"stages\[0\]: .*has frozen weight; got the parameters inner.weight, .*expected .*weight, bias; say"
    )
    x, y = normal(4, 3), normal(4, 3, seed=1)
    with pytest.raises(ValueError, match=told):
        pp.value_and_grad([stage], squared, schedule)(given, x, y)
    mask = {0: {"inner": {"weight": False, "bias": True}, **{key: True for key in more}}}
    _, grads = pp.value_and_grad([stage], squared, schedule, trainable=mask)(given, x, y)
    assert not grads[0]["inner"]["weight"].any() and grads[0]["inner"]["bias"].any()
    assert not more or grads[0]["weight"].any()


def test_a_plain_function_around_a_frozen_module_is_refused_by_a_trainer():
    """Weight decay would have changed the parameter, of which the trainer did not know that it is frozen."""
    module = nn.Linear(3, 3).double()
    module.weight.requires_grad_(False)
    fn, params, _ = pp.stage_from_module(module)
    x, y = normal(4, 3), normal(4, 3, seed=1)
    _, grads = pp.value_and_grad([lambda p, x: fn(p, x)], squared, pp.gpipe(1, 2))({0: params}, x, y)
    assert not grads[0]["weight"].any() and grads[0]["bias"].any()
    options = [squared, pp.gpipe(1, 2), pp.optim.sgd(0.1, weight_decay=0.5)]
    trainer = new_trainer([lambda p, x: fn(p, x)], *options)
    with pytest.raises(ValueError, match=r"stages\[0\]: it calls .* has frozen 'weight'.*trainable="):
        trainer.step(trainer.init({0: params}), x, y)
    mask = {0: {"weight": False, "bias": True}}
    trainer = new_trainer([lambda p, x: fn(p, x)], *options, trainable=mask)
    state, _ = trainer.step(trainer.init({0: params}), x, y)
    assert torch.equal(state.params[0]["weight"], module.weight)
    assert not torch.equal(state.params[0]["bias"], module.bias)


MASKS = [
    {1: False},
    {1: {"w": False, "b": False}},
    {1: lambda params: {name: False for name in params}, 0: True},
]


@pytest.mark.parametrize("mask", [*MASKS, lambda params: "up" in params])
@pytest.mark.parametrize("engine", [pp.engines.graph, pp.engines.functional, pp.engines.eager])
def test_a_mask_freezes_leaves(mask, engine):
    stages = [lambda p, x: torch.tanh(x @ p["up"]), lambda p, x: x @ p["w"] + p["b"]]
    params = {0: {"up": normal(3, 3)}, 1: {"w": normal(3, 3, seed=1), "b": normal(3)}}
    x, y = normal(4, 3), normal(4, 3, seed=1)
    step = pp.value_and_grad(stages, squared, pp.zb_h1(2, 2), engine=engine, trainable=mask)
    _, whole = pp.value_and_grad(stages, squared, pp.zb_h1(2, 2), engine=engine)(params, x, y)
    _, grads = step(params, x, y)
    assert torch.equal(grads[0]["up"], whole[0]["up"]) and not any(g.any() for g in grads[1].values())
    optimizer = pp.optim.adamw(0.1, weight_decay=0.5)
    trainer = pp.Trainer(stages, squared, pp.zb_h1(2, 2), optimizer, engine=engine, trainable=mask)
    state = trainer.init({s: {name: p.clone() for name, p in tree.items()} for s, tree in params.items()})
    for _ in range(2):
        state, _ = trainer.step(state, x, y)
    assert all(torch.equal(state.params[1][name], p) for name, p in params[1].items())
    assert not torch.equal(state.params[0]["up"], params[0]["up"])


@pytest.mark.parametrize(
    "mask, error, text",
    [
        ("all", TypeError, "trainable: got 'all'"),
        ({2: True}, ValueError, r"trainable: got masks of the stages \[2\], expected some of 0 to 0"),
        ({0: {"v": True}}, ValueError, r"trainable\[0\]: got .* expected booleans in the structure"),
        ({0: {"w": 1}}, TypeError, r"trainable\[0\]: got .* expected a boolean"),
        (lambda params: params["v"], ValueError, r"trainable\[0\]: it raised KeyError"),
    ],
)
def test_masks_of_another_form_are_refused(mask, error, text):
    with pytest.raises(error, match=text):
        step = pp.value_and_grad([lambda p, x: x * p["w"]], squared, pp.gpipe(1, 2), trainable=mask)
        step({0: {"w": normal(3)}}, normal(4, 3), normal(4, 3))


def on_one_rank(rank, size, kind):
    """Freeze one of two places of a parameter."""
    mesh = init_device_mesh("cpu", (1, 2) if kind == "data" else (2, 1), mesh_dim_names=("pp", "dp"))
    module = nn.Linear(3, 3).double()
    module.weight.data, module.bias.data = normal(3, 3), normal(3)
    module.weight.requires_grad_(bool(rank))
    fn, own, _ = pp.stage_from_module(module)
    stages = {
        "tied": [fn if stage == rank else None for stage in range(2)],
        "data": [fn],
        "replicas": [fn] * 2,
    }
    build = {"tied": pp.gpipe(2, 2), "data": pp.gpipe(1, 2), "replicas": pp.dualpipe(2, 4)}[kind]
    tied = {"w": [(0, "weight"), (1, "weight")]} if kind == "tied" else None
    x, y = normal(4, 3), normal(4, 3, seed=1)
    mine = {"tied": [rank], "data": [0], "replicas": [0, 1]}[kind]
    with pp.P2P(mesh=mesh, axes=pp.Axes("pp", "dp"), timeout=30) as transport:
        trainer = pp.Trainer(stages[kind], squared, build, pp.optim.sgd(0.1), transport=transport, tied=tied)
        state = trainer.init({s: {name: t.clone() for name, t in own.items()} for s in mine})
        with pytest.raises(pp.AgreementError, match="frozen") as caught:
            trainer.step(state, x, y)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["tied", "data", "replicas"])
def test_one_parameter_that_one_rank_has_frozen_is_told(two, kind):
    for text in two(on_one_rank, kind):
        assert "weight" in text or "tied parameters 'w'" in text


def together(rank, size, name):
    """Freeze a parameter at all of its places: tied, or in two replicas of a stage."""
    modules = [nn.Linear(3, 3).double() for _ in range(2)]
    for module in modules:
        module.weight.data, module.bias.data = normal(3, 3), normal(3)
        module.weight.requires_grad_(False)
    made = [pp.stage_from_module(module) for module in modules]
    build, tied = (
        (pp.gpipe(2, 4), {"w": [(0, "weight"), (1, "weight")]})
        if name == "tied"
        else (pp.dualpipe(2, 4), None)
    )
    mine = range(2) if size == 1 else build.model_stages_of(rank)
    with pp.InProcess() if size == 1 else pp.P2P(timeout=30) as transport:
        trainer = pp.Trainer(
            [fn for fn, _, _ in made], squared, build, pp.optim.sgd(0.1), transport=transport, tied=tied
        )
        before = {s: {name: t.clone() for name, t in made[s][1].items()} for s in mine}
        state, _ = trainer.step(trainer.init(before), normal(8, 3), normal(8, 3, seed=1))
        assert all(torch.equal(before[s]["weight"], state.params[s]["weight"]) for s in mine)
        assert not any(torch.equal(before[s]["bias"], state.params[s]["bias"]) for s in mine)
    return [state.params[s]["bias"] for s in range(2) if s in mine]


@pytest.mark.parametrize("name", ["tied", "replicas"])
def test_one_parameter_is_frozen_at_all_of_its_places(two, name):
    alone = together(0, 1, name)
    for rank, biases in enumerate(two(together, name)):
        assert all(map(torch.equal, biases, alone if name == "replicas" else [alone[rank]]))


def test_an_evaluation_runs_the_programs_of_steps_with_frozen_leaves():
    """It traced its own, as it did not know what is frozen."""
    calls = []

    def counting(params, x):
        calls.append(0)
        return x @ params["w"] + params["b"]

    mask = lambda params: {"w": True, "b": False}  # noqa: E731
    trainer = pp.Trainer([counting], squared, pp.gpipe(1, 2), pp.optim.sgd(0.1), trainable=mask)
    x, y = normal(4, 3), normal(4, 3, seed=1)
    state, _ = trainer.step(trainer.init({0: {"w": normal(3, 3), "b": normal(3)}}), x, y)
    traced = len(calls)
    trainer.evaluate(state, x, y)
    assert len(calls) == traced


BASE = 40  # the width of a frozen matrix, and 2 of the trained ones beside it


def adapted(p, x):
    return torch.tanh(x @ p["w"].to(x.dtype) + x @ p["a"] @ p["b"])


def adapters(dtype=torch.float64):
    return {"w": normal(BASE, BASE).to(dtype), "a": normal(BASE, 2), "b": normal(2, BASE, seed=1)}


ONLY = {"w": False, "a": True, "b": True}


def counting(rank, size, shard):
    """Train adapters beside a frozen matrix; return how many numbers travelled in a step, and are kept."""
    numbers = []

    def counted(method):
        def call(self, tensor, *args):
            numbers.append(tensor.numel())
            return method(self, tensor, *args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "reduce_scatter", "all_gather"):
            patch.setattr(Collective, name, counted(getattr(Collective, name)))
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
        options = {"axes": pp.Axes("pp", "dp"), "shard": shard, "trainable": {0: ONLY}, "clip": 1.0}
        with new_trainer([adapted], squared, pp.gpipe(1, 2), pp.optim.adamw(0.1), mesh, **options) as trainer:
            state = trainer.init({0: adapters()})
            for n in range(2):
                numbers.clear()
                state, _ = trainer.step(state, normal(4, BASE, seed=n), normal(4, BASE, seed=9))
    return sum(numbers), sum(local(t).numel() for t in tree_leaves(state.optimizer))


@pytest.mark.parametrize(
    "shard, gathered", [("none", 0), ("optimizer", 2 * BASE), ("params", BASE * BASE // 2 + 2 * BASE)]
)
def test_frozen_leaves_are_not_summed_and_have_no_moments(two, shard, gathered):
    """Gathers count what a rank gives. The loss and the norm are summed over all ranks."""
    trained, common = 4 * BASE, 2
    kept = 2 * trained // (1 if shard == "none" else 2) + 1
    assert two(counting, shard) == [(trained + gathered + common, kept)] * 2


def test_a_state_of_other_frozen_leaves_is_told():
    trainers = [
        new_trainer([adapted], squared, pp.gpipe(1, 2), pp.optim.adamw(0.1), trainable=mask)
        for mask in ({0: ONLY}, None)
    ]
    state = trainers[0].init({0: adapters()})
    with pytest.raises(ValueError, match=r"state.optimizer\[0\]\['mean'\]\['w'\]: got nothing, expected"):
        trainers[1].step(state, normal(4, BASE), normal(4, BASE))
