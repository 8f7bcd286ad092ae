"""Optimizers on whole leaves give the numbers of their references; groups have optimizers of their own."""

import pytest
import torch
from torch import nn

import ppfunc as pp
from ppfunc.stage.tree import tree_map
from tests.models import normal


def params(dtype=torch.float64):
    return {"w": normal(6, 4).to(dtype), "v": normal(3, 5, seed=3).to(dtype)}


def trained(optimizer, tree, steps=4):
    state = optimizer.init(tree)
    for n in range(steps):
        tree, state = optimizer.update(
            tree_map(lambda p, n=n: (p.sin() * (n + 1)).to(p.dtype), tree), state, tree
        )
    return tree


def trained_by_torch(make, tree, steps=4):
    own = {name: nn.Parameter(p.clone()) for name, p in tree.items()}
    optimizer = make(list(own.values()))
    for n in range(steps):
        for p in own.values():
            p.grad = (p.detach().sin() * (n + 1)).to(p.dtype)
        optimizer.step()
    return {name: p.detach() for name, p in own.items()}


@pytest.mark.parametrize("options", [{}, {"nesterov": False}, {"match_rms": True}, {"ns_steps": 3}])
def test_muon_is_that_of_torch(options):
    adjusted = {"adjust_lr_fn": "match_rms_adamw"} if options.get("match_rms") else options
    expected = trained_by_torch(lambda p: torch.optim.Muon(p, 0.02, **adjusted), params(torch.float32))
    got = trained(pp.optim.muon(0.02, **options), params(torch.float32))
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)  # both compute in bfloat16


def test_muon_of_float64_has_singular_values_near_one():
    zeros = {"w": torch.zeros(6, 4, dtype=torch.float64)}
    optimizer = pp.optim.muon(1.0, weight_decay=0.0, ns_steps=12)
    new, _ = optimizer.update({"w": normal(6, 4)}, optimizer.init(zeros), zeros)
    values = torch.linalg.svdvals(new["w"]) / 1.5**0.5
    assert values.min() > 0.6 and values.max() < 1.3


@pytest.mark.parametrize("shape", [(3, 6, 4), (2, 4, 6), (1, 5, 5)])
def test_muon_of_a_stack_is_that_of_its_matrices(shape):
    stack = normal(*shape)
    got = trained(pp.optim.muon(0.02), {"w": stack})["w"]
    expected = [trained(pp.optim.muon(0.02), {"w": matrix})["w"] for matrix in stack]
    torch.testing.assert_close(got, torch.stack(expected), rtol=1e-12, atol=1e-12)


def test_groups_train_as_their_optimizers_do():
    tree = {
        "h": [{"w": normal(3, 3), "bias": normal(3)}, {"w": normal(2, 3), "bias": normal(2)}],
        "norm": normal(4),
    }
    decayed, plain = pp.optim.adamw(0.1, weight_decay=0.5), pp.optim.sgd(0.2, 0.9)
    got = trained(pp.optim.by_name({"*.bias|norm": plain, "*.w": decayed}), tree)
    one, other = trained(decayed, tree), trained(plain, tree)
    assert torch.equal(got["norm"], other["norm"])
    for n in (0, 1):
        assert torch.equal(got["h"][n]["bias"], other["h"][n]["bias"])
        assert torch.equal(got["h"][n]["w"], one["h"][n]["w"])


def test_muon_gives_other_leaves_to_the_rest():
    rest = pp.optim.adamw(0.1)
    tree = params() | {"b": normal(4), "n": torch.arange(2)}
    got = trained(pp.optim.muon(0.02, rest=rest), tree)
    assert torch.equal(got["b"], trained(rest, tree)["b"]) and got["n"] is tree["n"]
    assert torch.equal(got["w"], trained(pp.optim.muon(0.02), params())["w"])


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: pp.optim.by_name({}), TypeError, "expected optimizers by pattern"),
        (
            lambda: pp.optim.by_name({"*": 3}),
            TypeError,
            r"groups\['\*'\]: got 3 of type int, expected init and update",
        ),
        (
            lambda: pp.optim.by_name(
                {"*": pp.optim.chain(pp.optim.clip_by_global_norm(1.0), pp.optim.sgd(1.0))}
            ),
            ValueError,
            r"chain\(clip, by_name\(\.\.\.\)\)",
        ),
        (
            lambda: pp.optim.by_name({"a*": pp.optim.sgd(1.0)}).init(params()),
            ValueError,
            "'w' matches none of 'a.'; add a group",
        ),
        (
            lambda: pp.optim.muon(1.0).init({"b": normal(3)}),
            ValueError,
            "'b' of 1 dimensions .* expected real matrices, or stacks of them",
        ),
        (lambda: pp.optim.muon(1.0, 0.0), ValueError, "nesterov needs momentum > 0"),
        (
            lambda: pp.optim.muon(1.0).init({"z": normal(2, 2, dtype=torch.complex128)}),
            ValueError,
            "'z' of 2 dimensions in torch.complex128, expected real matrices",
        ),
    ],
)
def test_what_makes_no_sense_is_named(make, error, words):
    with pytest.raises(error, match=words):
        make()
