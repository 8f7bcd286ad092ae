"""Where ranks hold parts of parameters, an optimizer says that it works element by element, or is refused."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ppfunc as pp
from ppfunc.stage.tree import tree_leaves, tree_map
from ppfunc.training.optim.optimizer import text_of
from tests.models import new_trainer, normal, squared
from tests.sharded_models import full


def signs(elementwise):
    """Make an optimizer without a state that works element by element, and may say so."""

    def update(grads, state, params):
        return tree_map(lambda p, g: p - 0.1 * g.sign() if p.is_floating_point() else p, params, grads), state

    return pp.optim.Optimizer(lambda params: (), update, text="signs", elementwise=elementwise)


def of_some_names(grads, state, params):
    """Descend with momentum where a name has one letter."""
    kept = {name: 0.9 * m + grads[name] for name, m in state["momentum"].items()}
    new = {name: p - 0.1 * kept.get(name, grads[name]) for name, p in params.items() if name != "n"}
    return {**params, **new}, {"momentum": kept}


OF_SOME_NAMES = pp.optim.Optimizer(
    lambda params: {"momentum": {n: torch.zeros_like(params[n]) for n in ("w", "b")}},
    of_some_names,
    elementwise=True,
)
MAKE = {
    "of some names": lambda: OF_SOME_NAMES,
    "adamw": lambda: pp.optim.adamw(0.1),
    "groups": lambda: pp.optim.by_name({"b": pp.optim.sgd(0.1, 0.9), "*": pp.optim.adamw(0.1)}),
    "masked": lambda: pp.optim.adamw(
        0.1, weight_decay=0.5, mask=lambda own: {name: p.ndim > 1 for name, p in own.items()}
    ),
    "signs": lambda: signs(True),
    "unknown": lambda: signs(False),
    "muon": lambda: pp.optim.muon(0.1, rest=pp.optim.adamw(0.1)),
    "muon and signs": lambda: pp.optim.by_name({"w": pp.optim.muon(0.1), "*": signs(True)}),
    "adamw and unknown": lambda: pp.optim.by_name({"w": signs(False), "*": pp.optim.adamw(0.1)}),
}
REFUSED = "unknown", "adamw and unknown"
WIDTH = 6


def stage(p, x):
    return torch.tanh(x @ p["w"]) * p["b"].sum() + p["large"].sum() / 1000


def params():
    return {"w": normal(WIDTH, WIDTH), "b": normal(2), "large": normal(512), "n": torch.arange(2)}


def trained(rank, size, name, shard, cut="dp"):
    """Train; return the parameters, which leaves of the state are cut, or the error at init."""
    shape, names = ((1, 1, 2), ("pp", "dp", "tp")) if cut == "tp" else ((1, 2), ("pp", "dp"))
    mesh, own = init_device_mesh("cpu", shape, mesh_dim_names=names), params()
    if cut == "tp":
        own["large"] = distribute_tensor(own["large"], mesh["tp"], [Shard(0)])
    options = {"axes": pp.Axes(*names), "shard": shard}
    with new_trainer([stage], squared, pp.gpipe(1, 2), MAKE[name](), mesh, **options) as trainer:
        try:
            state = trainer.init({0: own})
        except ValueError as error:
            return str(error)
        for n in range(2) if cut == "dp" else ():
            state, _ = trainer.step(state, normal(4, WIDTH, seed=n), normal(4, WIDTH, seed=9))
    kept = [isinstance(t, DTensor) for t in tree_leaves(state.optimizer)]
    return tree_leaves(full(state.params)), kept


@pytest.mark.parametrize("name", MAKE)
def test_sharded_updates_are_those_of_the_whole_or_refused(two, name):
    (whole, _), _ = two(trained, name, "none")
    for got in [*two(trained, name, "optimizer"), *two(trained, name, "params")]:
        if name in REFUSED:
            assert f"got the optimizer {text_of(MAKE[name]())}, which may work on whole parameters" in got
        else:
            torch.testing.assert_close(got[0], whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["adamw", "unknown"])
def test_tensor_parallel_parameters_are_parts_too(two, name):
    for got in two(trained, name, "none", "tp"):
        assert isinstance(got, str) == (name == "unknown")


def test_the_state_of_a_group_is_cut_like_its_parameters(two):
    for _, kept in two(trained, "groups", "optimizer"):
        assert kept == [False, True, False, *[True, True] * 2]


def outside(rank, size, shard, call):
    """Run a step function on the parameters of a trainer's state; return its loss, or the error."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    options = {"axes": pp.Axes("pp", "dp"), "shard": shard}
    x, y = normal(4, WIDTH), normal(4, WIDTH, seed=9)
    with new_trainer([stage], squared, pp.gpipe(1, 2), pp.optim.sgd(0.1), mesh, **options) as trainer:
        state = trainer.init({0: params()})
        expected = float(trainer.evaluate(state, x, y))
        step = getattr(pp, call)([stage], squared, pp.gpipe(1, 2))
        try:
            result = step(state.params, x, y)
        except ValueError as error:
            return str(error)
        return float(result[0] if isinstance(result, tuple) else result) == expected


@pytest.mark.parametrize("call", ["evaluate", "value_and_grad"])
def test_parts_over_data_ranks_are_refused_outside_of_the_trainer(two, call):
    assert two(outside, "optimizer", call) == [True, True]
    for got in two(outside, "params", call):
        assert "params[0]['w']: got a part of a parameter, which lies over the data ranks 'dp'" in got


def over_an_unknown_axis(rank, size):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    own = {"w": distribute_tensor(normal(WIDTH, WIDTH), mesh, [Shard(0)])}
    half = lambda p, x: x[:, : WIDTH // 2] @ p["w"]  # noqa: E731
    with new_trainer([half], squared, pp.gpipe(1, 2), pp.optim.muon(0.1)) as trainer:
        state = trainer.init({0: own})
        try:
            trainer.step(state, normal(4, WIDTH), normal(4, WIDTH))
        except (ValueError, pp.PipelineError) as error:
            return str(error)


def test_matrices_over_an_axis_that_the_transport_lacks_are_refused(two):
    for got in two(over_an_unknown_axis):
        assert "got matrices in parts over the axis 'tp', which are updated whole" in got
