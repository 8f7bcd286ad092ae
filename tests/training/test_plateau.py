"""Rates that fall where a metric stays: beside torch, in a trainer, resumed, and told where ranks differ."""

import pytest
import torch
from hypothesis import example, given, strategies as st
from torch.distributed.device_mesh import init_device_mesh

import ppfunc as pp
from ppfunc.stage.tree import tree_leaves, tree_map
from ppfunc.training.optim import adamw, by_name, chain, clip_by_global_norm, ema, muon, plateau, sgd
from tests.models import new_trainer, normal, same_bits, squared

WIDTH = 4


def stage(p, x):
    return torch.tanh(x @ p["w"])


def batch(n):
    return normal(4, WIDTH, seed=n), normal(4, WIDTH, seed=9)


@given(
    metrics=st.lists(st.sampled_from([0.5, 0.999, 1.0, 1.001, 2.0, -1.0, float("nan")]), max_size=20),
    factor=st.sampled_from([0.0, 0.1, 0.5]),
    patience=st.integers(0, 3),
    cooldown=st.integers(0, 3),
    threshold=st.sampled_from([0.0, 1e-4, 0.1]),
    least=st.sampled_from([0.0, 0.03, 0.3]),
    mode=st.sampled_from(["min", "max"]),
)
@example([1.0, 1.0], 0.1, 0, 0, 0.0, 0.3, "min")  # it rose to the least rate
def test_the_rate_is_that_of_torch(metrics, factor, patience, cooldown, threshold, least, mode):
    theirs = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        theirs, mode, factor, patience, threshold, cooldown=cooldown, min_lr=least, eps=0.0
    )
    rate = plateau(0.1, factor, patience, threshold, cooldown=cooldown, least=least, mode=mode)
    state = rate.init(None)
    for metric in metrics:
        scheduler.step(metric)
        state = rate.observe(state, torch.tensor(metric, dtype=torch.float64))
        assert state["lr"].item() == theirs.param_groups[0]["lr"]


OPTIMIZERS = {
    "adamw": (adamw, lambda own: own),
    "donated": (lambda lr: adamw(lr, donate=True), lambda own: own),
    "clipped": (lambda lr: chain(clip_by_global_norm(0.1), sgd(lr, 0.9)), lambda own: own),
    "groups": (lambda lr: by_name({"w": adamw(lr), "*": sgd(0.2)}), lambda own: own["group0"]),
    "average": (lambda lr: ema(adamw(lr)), lambda own: own["inner"]),
    "matrices": (lambda lr: muon(lr, rest=adamw(lr)), lambda own: own["group0"]),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rate_that_falls_is_that_of_an_optimizer_made_with_it(name, tmp_path):
    """Train with 0.1, then with 0.05, saved and loaded before the second metric."""
    make, rate_state = OPTIMIZERS[name]
    params = {0: {"w": normal(WIDTH, WIDTH)}, 1: {"w": normal(WIDTH, WIDTH, seed=1)}}
    own, *fixed = (
        new_trainer([stage] * 2, squared, pp.gpipe(2, 2), make(lr))
        for lr in (plateau(0.1, 0.5, patience=0), 0.1, 0.05)
    )
    state, wanted = own.init(tree_map(torch.clone, params)), fixed[0].init(params)
    for n, trainer in enumerate(fixed):
        state, metrics = own.step(state, *batch(n))
        wanted, theirs = trainer.step(wanted, *batch(n))
        assert same_bits(state.params, wanted.params)
        assert tree_leaves(metrics.lr) == tree_leaves(theirs.lr)
        state = own.observe(state, metrics.loss if n else 1.0)
        pp.checkpoint.save(tmp_path, state)
        like = own.init(tree_map(torch.zeros_like, params))
        state = own.observe(pp.checkpoint.load(tmp_path, like), torch.tensor(2.0))
    assert [rate_state(state.optimizer[s])["rate"]["lr"].item() for s in (0, 1)] == [0.025, 0.025]


def test_without_such_a_rate_there_is_nothing_to_observe():
    trainer = new_trainer([stage], squared, pp.gpipe(1, 2), chain(clip_by_global_norm(1.0), sgd(0.1)))
    with pytest.raises(ValueError, match=r"metric: no rate of sgd\(lr 0.1.* depends on one"):
        trainer.observe(trainer.init({0: {"w": normal(WIDTH, WIDTH)}}), 1.0)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"factor": 1.0}, "factor is 1.0, expected a number of at least 0 and less than 1"),
        ({"patience": -1}, "patience = -1"),
        ({"threshold": -1.0}, "threshold is -1.0"),
        ({"mode": "least"}, "mode"),
    ],
)
def test_numbers_out_of_range_are_refused(numbers, text):
    with pytest.raises(ValueError, match=text):
        plateau(**{"lr": 0.1, **numbers})


def told_apart(rank, size, names):
    """Data ranks, or stages of a pipeline, that observe other metrics; then the same ones."""
    mesh = init_device_mesh("cpu", (1, 2) if "dp" in names else (2,), mesh_dim_names=names)
    ranks = 1 if "dp" in names else 2
    with new_trainer(
        [stage] * ranks, squared, pp.gpipe(ranks, 2), sgd(plateau(0.1)), mesh, axes=pp.Axes(*names)
    ) as trainer:
        state = trainer.init({rank if ranks == 2 else 0: {"w": normal(WIDTH, WIDTH)}})
        state, _ = trainer.step(state, *batch(0))
        with pytest.raises(pp.AgreementError, match=r"observed [12]\.0"):
            trainer.step(trainer.observe(state, 1.0 + rank), *batch(1))
    with new_trainer(
        [stage] * ranks, squared, pp.gpipe(ranks, 2), sgd(plateau(0.1)), mesh, axes=pp.Axes(*names)
    ) as trainer:
        state = trainer.init({rank if ranks == 2 else 0: {"w": normal(WIDTH, WIDTH)}})
        for n in range(2):
            state, metrics = trainer.step(state, *batch(n))
            state = trainer.observe(state, metrics.loss)
    return True


@pytest.mark.parametrize("names", [("pp", "dp"), ("pp",)], ids=["data", "stages"])
def test_ranks_that_observe_other_metrics_are_told(two, names):
    assert two(told_apart, names) == [True, True]
