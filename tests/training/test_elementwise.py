"""Where ranks hold parts of parameters, an optimizer works element by element, or is refused by name."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ppfunc as pp
from ppfunc.stage.tree import tree_leaves, tree_map
from ppfunc.training.optim.protocols import text_of
from tests.models import new_trainer, normal, squared


def plain(rule):
    """Make an optimizer without a state, of which nobody knows how it works."""
    floats = lambda p, g: rule(p, g) if p.is_floating_point() else p  # noqa: E731
    return pp.optim.Optimizer(
        lambda params: (), lambda grads, state, params: (tree_map(floats, params, grads), state), text="mine"
    )


def of_some_names(grads, state, params):
    """Descend with momentum where a name has one letter."""
    kept = {name: 0.9 * m + grads[name] for name, m in state["momentum"].items()}
    new = {name: p - 0.1 * kept.get(name, grads[name]) for name, p in params.items() if name != "n"}
    return {**params, **new}, {"momentum": kept}


OF_SOME_NAMES = pp.optim.Optimizer(
    lambda params: {"momentum": {n: torch.zeros_like(params[n]) for n in ("w", "b")}}, of_some_names
)
MAKE = {
    "adamw": lambda: pp.optim.adamw(0.1),
    "groups": lambda: pp.optim.by_name({"b": pp.optim.sgd(0.1, 0.9), "*": pp.optim.adamw(0.1)}),
    "signs": lambda: plain(lambda p, g: p - 0.1 * g.sign()),
    "rows": lambda: plain(lambda p, g: p - 0.1 * (g - g.mean(-1, keepdim=True))),
    "norms": lambda: plain(lambda p, g: p - 0.1 * g / g.norm()),
    "slowly": lambda: plain(lambda p, g: p - 1e-7 * g / g.norm()),
    "of large ones": lambda: plain(lambda p, g: p - 0.1 * g / (g.norm() if p.shape[0] > 200 else 1)),
    "muon": lambda: pp.optim.muon(0.1, rest=pp.optim.adamw(0.1)),
    "of some names": lambda: OF_SOME_NAMES,
    "muon and signs": lambda: pp.optim.by_name({"w": pp.optim.muon(0.1), "*": MAKE["signs"]()}),
    "adamw and signs": lambda: pp.optim.by_name({"w": MAKE["signs"](), "*": pp.optim.adamw(0.1)}),
}
SERVED = {"adamw", "groups", "signs", "muon", "of some names", "muon and signs", "adamw and signs"}
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
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in tree_leaves(state.params)], kept


@pytest.mark.parametrize("name", MAKE)
def test_sharded_updates_are_those_of_the_whole_or_refused(two, name):
    (whole, _), _ = two(trained, name, "none")
    for got in [*two(trained, name, "optimizer"), *two(trained, name, "params")]:
        if name in SERVED:
            torch.testing.assert_close(got[0], whole, rtol=1e-12, atol=1e-14)
        else:
            assert "which updates a part of a parameter in another way than the whole" in got
            assert f"got the optimizer {text_of(MAKE[name]())}" in got


@pytest.mark.parametrize("name", ["adamw", "norms"])
def test_tensor_parallel_parameters_are_parts_too(two, name):
    for got in two(trained, name, "none", "tp"):
        assert isinstance(got, str) == (name == "norms")


def test_the_state_of_a_group_is_cut_like_its_parameters(two):
    for _, kept in two(trained, "groups", "optimizer"):
        assert kept == [False, True, False, *[True, True] * 2]


def test_an_optimizer_that_cannot_be_tried_out_says_so_itself(two):
    for got in two(tried):
        assert got[0].endswith(
            "float32 alone; if it works element by element, say so, Optimizer(..., elementwise=True)"
        )
        assert got[1] is True


def tried(rank, size):
    def rule(p, g):
        if p.dtype != torch.float32:
            raise RuntimeError("float32 alone")
        return p - g

    mesh, found = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp")), []
    for optimizer in (plain(rule), plain(rule)._replace(elementwise=True)):
        options = {"axes": pp.Axes("pp", "dp"), "shard": "optimizer"}
        with new_trainer([stage], squared, pp.gpipe(1, 2), optimizer, mesh, **options) as trainer:
            own = tree_map(lambda p: p.float() if p.is_floating_point() else p, params())
            try:
                trainer.init({0: own})
                found.append(True)
            except ValueError as error:
                found.append(str(error))
    return found


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
