"""Updates are functions: autograd and torch.func see through them, and never see zeros."""

import pytest
import torch
from torch.autograd import forward_ad, gradcheck
from torch.func import grad, jvp, vmap

import ppfunc as pp
from ppfunc.stage.tree import tree_map
from tests.models import dense, normal, squared

WORDS = {
    "adamw": lambda: pp.optim.adamw(0.1),
    "sgd": lambda: pp.optim.sgd(0.1),
    "nesterov": lambda: pp.optim.sgd(0.1, 0.9, 0.2, nesterov=True),
    "clipped": lambda: pp.optim.chain(pp.optim.clip_by_global_norm(0.5), pp.optim.adamw(0.1)),
    "muon": lambda: pp.optim.muon(0.1, rest=pp.optim.adamw(0.1)),
    "average": lambda: pp.optim.ema(pp.optim.adamw(0.1), 0.8),
    "by name": lambda: pp.optim.by_name({"b": pp.optim.sgd(0.1), "*": pp.optim.adamw(0.1)}),
    "donated": lambda: pp.optim.adamw(0.1, donate=True),
    "from updates": lambda: pp.optim.from_updates(HALVED),
}
HALVED = pp.optim.Optimizer(
    lambda params: (), lambda grads, state, params: (tree_map(lambda g: -g / 2, grads), state)
)


def params():
    return {"w": normal(4, 3), "b": normal(3)}


def gradients():
    return {"w": normal(4, 3, seed=1), "b": normal(3, seed=2)}


def cubes(tree):
    return sum((leaf**3).sum() for leaf in tree.values())


def after_one(optimizer):
    """Return parameters and state after an update, so that no state is zero."""
    return optimizer.update(gradients(), optimizer.init(params()), params())


@pytest.mark.parametrize("name", WORDS)
def test_derivatives_of_an_update_are_those_of_differences(name):
    optimizer = WORDS[name]()
    before, state = after_one(WORDS[name]())

    def result(w, b, p):
        state_copy, p_copy = tree_map(torch.clone, (state, {"w": p, "b": before["b"]}))
        return cubes(optimizer.update({"w": w, "b": b}, state_copy, p_copy)[0])

    leaves = [t.clone().requires_grad_() for t in (gradients()["w"] * 2, gradients()["b"] * 2, before["w"])]
    assert gradcheck(result, leaves)
    assert gradcheck(result, leaves, check_forward_ad=True, check_backward_ad=False)
    expected = torch.autograd.grad(result(*leaves), leaves)
    torch.testing.assert_close(grad(result, (0, 1, 2))(*(t.detach() for t in leaves)), expected)


@pytest.mark.parametrize("name", WORDS)
def test_an_update_maps_over_gradients_and_over_populations(name):
    optimizer = WORDS[name]()
    before, state = after_one(optimizer)
    several = tree_map(lambda g: torch.stack([g, 2 * g, -g]), gradients())
    updated = lambda *trees: optimizer.update(*trees)[0]  # noqa: E731  # vmap returns no trees with None
    got = vmap(updated, in_dims=(0, None, None))(several, state, before)
    population = tree_map(lambda t: torch.stack([t] * 3), (gradients(), state, before))
    dims = tree_map(lambda t: 0, population)  # with None in the place of None
    whole = vmap(updated, in_dims=dims)(*population)
    for n in range(3):
        one = tree_map(lambda g, n=n: g[n], several)
        expected = optimizer.update(one, *tree_map(torch.clone, (state, before)))
        torch.testing.assert_close((tree_map(lambda t, n=n: t[n], got)), expected[0], rtol=1e-10, atol=1e-12)
    again = optimizer.update(gradients(), *tree_map(torch.clone, (state, before)))[0]
    torch.testing.assert_close(tree_map(lambda t: t[2], whole), again, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["adamw", "sgd", "nesterov"])
def test_the_formula_computes_what_the_kernel_does(name):
    optimizer = WORDS[name]()
    tree = params() | {"z": normal(2, dtype=torch.complex128), "n": torch.arange(3)}
    state = optimizer.init(tree)
    for step in range(3):
        grads = tree_map(lambda p, step=step: (p + step).to(p.dtype), tree)
        plain = optimizer.update(grads, state, tree)
        seen = optimizer.update(
            tree_map(lambda g: g.clone().requires_grad_(g.dtype != torch.int64), grads), state, tree
        )
        assert seen[0]["w"].requires_grad and seen[0]["n"] is tree["n"]
        torch.testing.assert_close(tree_map(torch.Tensor.detach, seen), plain, rtol=1e-12, atol=1e-12)
        tree, state = plain


def test_a_rate_has_a_derivative_through_a_training():
    begin = params()

    def trained(rate):
        optimizer, p = pp.optim.adamw(lambda updates: rate), begin
        state = optimizer.init(p)
        for _ in range(3):
            p, state = optimizer.update(grad(cubes)(p), state, p)
        return cubes(p)

    rate, h = torch.tensor(0.01, dtype=torch.float64), 1e-6
    difference = (trained(rate + h) - trained(rate - h)) / (2 * h)
    torch.testing.assert_close(grad(trained)(rate), difference, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        jvp(trained, (rate,), (torch.ones_like(rate),))[1], difference, rtol=1e-6, atol=0
    )
    rates = torch.tensor([0.01, 0.1], dtype=torch.float64)
    torch.testing.assert_close(vmap(trained)(rates), torch.stack([trained(r) for r in rates]))


def test_a_population_trains_through_a_pipeline():
    schedule = pp.one_f_one_b(ranks=2, microbatches=2)
    stage = lambda p, x: torch.tanh(x @ p["w"])  # noqa: E731
    step = pp.value_and_grad([stage, stage], squared, schedule, engine=pp.engines.functional)
    optimizer, x, y = pp.optim.adamw(0.05), normal(4, 3), normal(4, 3, seed=1)

    def trained(w):
        p = {0: {"w": w}, 1: {"w": w.T.clone()}}
        state = {s: optimizer.init(tree) for s, tree in p.items()}
        for _ in range(3):
            _, grads = step(p, x, y)
            pairs = {s: optimizer.update(grads[s], state[s], p[s]) for s in p}
            p, state = ({s: pair[n] for s, pair in pairs.items()} for n in (0, 1))
        return p[0]["w"]

    several = torch.stack([normal(3, 3, seed=n) for n in range(3)])
    expected = torch.stack([trained(w) for w in several])
    torch.testing.assert_close(vmap(trained)(several), expected, rtol=1e-10, atol=1e-12)


def test_where_gradients_are_zero_derivatives_are_numbers():
    optimizer, zeros = pp.optim.adamw(0.1), tree_map(torch.zeros_like, params())
    derivative = grad(lambda g: cubes(optimizer.update(g, optimizer.init(params()), params())[0]))(zeros)
    assert all(leaf.isfinite().all() for leaf in derivative.values())


def test_dual_numbers_are_seen():
    optimizer, before = pp.optim.sgd(0.5), params()
    with forward_ad.dual_level():
        dual = {k: forward_ad.make_dual(g, torch.ones_like(g)) for k, g in gradients().items()}
        new, _ = optimizer.update(dual, optimizer.init(before), before)
        assert forward_ad.unpack_dual(new["b"]).tangent.tolist() == [-0.5] * 3


CLIPS = {
    "unclipped": pp.optim.sgd(0.1),
    "clipped": pp.optim.chain(pp.optim.clip_by_global_norm(0.1), pp.optim.adamw(0.1)),
    "by the largest": pp.optim.chain(pp.optim.clip_by_global_norm(0.01, float("inf")), pp.optim.sgd(0.1)),
}


@pytest.mark.parametrize("name", CLIPS)
def test_a_step_of_a_trainer_is_seen_through(name):
    x, y, along = normal(4, 3), normal(4, 3, seed=1), normal(4, 3, seed=2)
    with pp.Trainer([dense] * 2, squared, pp.gpipe(2, 2), CLIPS[name]) as trainer:
        state = trainer.init({s: {"w": normal(3, 3, seed=s)} for s in range(2)})

        def result(x):
            after, metrics = trainer.step(state, x, y)
            return cubes(after.params[0]) + cubes(after.params[1]) + metrics.loss + metrics.grad_norm

        slope = (result(x + 1e-6 * along) - result(x - 1e-6 * along)).item() / 2e-6
        assert (grad(result)(x) * along).sum().item() == pytest.approx(slope, rel=1e-6)
        assert jvp(result, (x,), (along,))[1].item() == pytest.approx(slope, rel=1e-6)
        several = torch.stack([x, x + along])
        torch.testing.assert_close(vmap(result)(several), torch.stack(list(map(result, several))))


def test_a_population_is_trained_from_its_first_parameters():
    """The memory of parameters that a transform wraps was asked for, which they have not."""
    x, y, along = normal(4, 3), normal(4, 3, seed=1), normal(3, 3, seed=2)
    with pp.Trainer([dense], squared, pp.gpipe(1, 2), CLIPS["clipped"]) as trainer:

        def result(w):
            state, _ = trainer.step(trainer.init({0: {"w": w}}), x, y)
            return cubes(state.params[0]) + cubes(trainer.step(state, x, y)[0].params[0])

        w = normal(3, 3, seed=3)
        slope = (result(w + 1e-6 * along) - result(w - 1e-6 * along)).item() / 2e-6
        assert (grad(result)(w) * along).sum().item() == pytest.approx(slope, rel=1e-6)
        several = torch.stack([w, along])
        torch.testing.assert_close(vmap(result)(several), torch.stack(list(map(result, several))))
