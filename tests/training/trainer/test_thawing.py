"""Another set of frozen parameters goes on with the moments of those that trained; others begin anew."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import ppfunc as pp
from ppfunc.stage.tree import tree_leaves, tree_map, tree_paths, tree_structure
from ppfunc.training.optim.optimizer import divided
from tests.models import new_trainer, normal, squared
from tests.sharded_models import full

WIDTH, STEPS = 4, 2
SETS = [{"a"}, set(), {"c"}, {"a", "b", "c"}, {"b"}]  # frozen, trainer after trainer
OPTIMIZERS = {
    "adamw": lambda: pp.optim.adamw(0.1),
    "donated": lambda: pp.optim.adamw(0.1, donate=True),
    "momentum": lambda: pp.optim.sgd(0.1, 0.9),
    "muon": lambda: pp.optim.muon(0.1, rest=pp.optim.adamw(0.1)),
    "average": lambda: pp.optim.ema(pp.optim.adamw(0.1), 0.8),
    "groups": lambda: divided(  # by patterns, a group that is frozen whole would be refused
        lambda name, parameter: int(name != "b"),
        {"b": pp.optim.sgd(0.1, 0.9), "others": pp.optim.adamw(0.1)},
        lambda: "groups",
    ),
}


def stage(p, x):
    return torch.tanh(x @ p["a"] + p["c"]) @ p["b"]


def params():
    return {"a": normal(WIDTH, WIDTH), "b": normal(WIDTH, WIDTH, seed=1), "c": normal(WIDTH, seed=2)}


def batch(n):
    return normal(8, WIDTH, seed=10 + n), normal(8, WIDTH, seed=50 + n)


def alone(optimizer):
    """The parameters after all steps, without a trainer: moments by hand, None for what is frozen."""
    own, state, n = params(), None, 0
    for frozen in SETS:
        bare = {name: None if name in frozen else p for name, p in own.items()}
        made = optimizer.init(tree_map(torch.clone, bare))
        before = {} if state is None else dict(zip(paths(state), tree_leaves(state), strict=True))
        leaves = [before.get(path, t) for path, t in zip(paths(made), tree_leaves(made), strict=True)]
        state = tree_structure(made).unflatten(leaves)
        for _ in range(STEPS):
            x, y = batch(n)
            grads = torch.func.grad(lambda p, x=x, y=y: squared(stage(p, x), y))(own)
            bare = {name: None if name in frozen else p for name, p in own.items()}
            grads = {name: None if name in frozen else g for name, g in grads.items()}
            new, state = optimizer.update(grads, state, bare)
            own, n = {name: own[name] if p is None else p for name, p in new.items()}, n + 1
    return own


def paths(tree):
    return tree_paths(tree_structure(tree))


def thawing(rank, size, name, shard):
    """Train with another trainer for every set; the parameters after all steps."""
    mesh = None if size == 1 else init_device_mesh("cpu", (1, size), mesh_dim_names=("pp", "dp"))
    options = {} if mesh is None else {"axes": pp.Axes("pp", "dp"), "shard": shard}
    part, state, n = slice(8 * rank // size, 8 * (rank + 1) // size), None, 0
    for frozen in SETS:
        only = {0: {key: key not in frozen for key in params()}}
        with new_trainer(
            [stage], squared, pp.gpipe(1, 2), OPTIMIZERS[name](), mesh, trainable=only, **options
        ) as trainer:
            if state is None:
                state = trainer.init({0: params()})
            else:
                state = trainer.init(state.params, state.stage_state, state.optimizer)
            for _ in range(STEPS):
                x, y = batch(n)
                (state, _), n = trainer.step(state, x[part], y[part]), n + 1
    return full(state.params[0])


@pytest.mark.filterwarnings("ignore:params. all parameters are frozen")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_are_kept_and_those_of_thawed_parameters_begin(name):
    expected = alone(OPTIMIZERS[name.replace("donated", "adamw")]())
    torch.testing.assert_close(thawing(0, 1, name, None), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name, shard", [("adamw", "optimizer"), ("adamw", "params"), ("muon", "params")])
def test_moments_are_kept_over_data_ranks(two, name, shard):
    expected = alone(OPTIMIZERS[name]())
    for got in two(thawing, name, shard):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda s: pp.optim.sgd(0.1, 0.9).init(params()), r"optimizer\[0\]\['m.*'\]\['a'\]: got "),
        (lambda s: {"mean": s["mean"], "square": s["square"]}, r"\['updates'\]: got nothing, expected torch"),
        (lambda s: {**s, "mean": {**s["mean"], "b": normal(3)}}, r"\['mean'\]\['b'\]: got .*\[3\] whole"),
        (lambda s: {**s, "mean": 3}, r"optimizer\[0\].* a tensor"),
    ],
)
def test_states_that_do_not_fit_are_refused(change, words):
    trainer = new_trainer([stage], squared, pp.gpipe(1, 2), pp.optim.adamw(0.1))
    with trainer, pytest.raises((ValueError, TypeError), match=words):
        before = trainer.init({0: params()}).optimizer[0]
        trainer.init({0: params()}, optimizer={0: change(before)})


# -- nothing trains


def split_of(frozen):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for n in frozen:
        model[n].requires_grad_(False)
    return pp.split(model, torch.zeros(2, 4), at=2)


FROZEN = "params: all parameters are frozen, or of integers, so that none trains"
TOO_SMALL = "params: they are kept in torch.bfloat16, where a learning rate of 0.0001 leaves a parameter of 1"


@pytest.mark.parametrize(
    "frozen, dtype, lr, precision, words",
    [
        ((0, 1), None, 0.1, None, FROZEN),
        ((0,), None, 1e-4, None, None),
        ((), torch.bfloat16, 1e-4, None, TOO_SMALL),
        ((), torch.bfloat16, 1e-4, pp.Precision(compute=torch.bfloat16), TOO_SMALL),
        ((), torch.bfloat16, pp.optim.linear(0.0, 1e-4, 100), None, TOO_SMALL),
        ((), torch.bfloat16, pp.optim.warmup_cosine(0.1, 1000, 5000), None, None),
        ((), torch.bfloat16, 1e-4, pp.Precision(compute=torch.bfloat16, master=torch.float32), None),
        ((0, 1), torch.bfloat16, 1e-4, None, FROZEN),
        ((), torch.bfloat16, 0.1, None, None),
    ],
    ids=["frozen", "in part", "small", "computed", "linear", "warm", "master", "frozen and small", "large"],
)  # fmt: skip
def test_parameters_that_no_step_changes_are_told(frozen, dtype, lr, precision, words, recwarn):
    split = split_of(frozen)
    params = split.params if dtype is None else tree_map(lambda t: t.to(dtype), split.params)
    stages = [lambda p, x: x @ p["w"]] if dtype else split
    params = {0: {"w": torch.ones(2, 2, dtype=dtype)}} if dtype else params
    only = {0: False} if frozen and dtype else None
    schedule = pp.gpipe(1, 1) if dtype else pp.gpipe(2, 1)
    with new_trainer(stages, squared, schedule, pp.optim.adamw(lr), precision=precision, trainable=only) as t:
        t.init(params)
    told = [str(w.message) for w in recwarn]
    assert len(told) == (words is not None) and all(text.startswith(words) for text in told), told


def told_over_ranks(rank, size, frozen):
    split = split_of(frozen)
    trainer = new_trainer(split, squared, pp.gpipe(2, 1), pp.optim.adamw(0.1), transport=pp.P2P())
    with trainer, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.init({rank: split.params[rank]})
    return [str(each.message)[: len(FROZEN)] for each in told]


def test_a_rank_whose_peer_trains_is_silent(two):
    assert two(told_over_ranks, (0,)) == [[], []]
    assert two(told_over_ranks, (0, 1)) == [[FROZEN], [FROZEN]]
