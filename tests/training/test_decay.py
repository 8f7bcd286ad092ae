"""Weight decay of some parameters: by a mask, sharded or not, and beside frozen ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ppfunc as pp
from ppfunc.stage.tree import tree_map
from tests.models import new_trainer, normal, squared

MATRICES = lambda params: {name: p.ndim > 1 for name, p in params.items()}  # noqa: E731


def params():
    return {"w": normal(4, 3), "b": normal(3), "n": torch.arange(2)}


def grads():
    return {"w": normal(4, 3, seed=1), "b": normal(3, seed=2), "n": torch.zeros(2, dtype=torch.int64)}


MAKE = {
    "adamw": (pp.optim.adamw, torch.optim.AdamW, {}),
    "sgd": (pp.optim.sgd, torch.optim.SGD, {}),
    "momentum": (pp.optim.sgd, torch.optim.SGD, {"momentum": 0.9}),
}


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("kind", MAKE)
def test_a_mask_makes_the_groups_of_torch(kind, donate):
    make, theirs, options = MAKE[kind]
    optimizer, own = make(0.1, weight_decay=0.5, mask=MATRICES, donate=donate, **options), params()
    w, b = (nn.Parameter(params()[name].clone()) for name in ("w", "b"))
    reference = theirs(
        [{"params": [w], "weight_decay": 0.5}, {"params": [b], "weight_decay": 0.0}], 0.1, **options
    )
    state = optimizer.init(own)
    for n in range(3):
        given = tree_map(lambda g, n=n: g * (n + 1), grads())
        own, state = optimizer.update(given, state, own)
        w.grad, b.grad = (grads()[name] * (n + 1) for name in ("w", "b"))
        reference.step()
    torch.testing.assert_close((own["w"], own["b"]), (w.detach(), b.detach()), rtol=1e-12, atol=0)


def test_a_mask_may_stand_for_branches_in_any_order():
    tree, flat = {"a": [normal(2), normal(3)], "b": normal(4)}, pp.optim.sgd(1.0, weight_decay=0.5)
    zeros = tree_map(torch.zeros_like, tree)
    for mask, decays in (
        ({"b": False, "a": True}, (True, True, False)),
        (False, (False,) * 3),
        ({"a": [False, True], "b": True}, (False, True, True)),
    ):
        optimizer = pp.optim.sgd(1.0, weight_decay=0.5, mask=lambda params, mask=mask: mask)
        got, _ = optimizer.update(zeros, optimizer.init(tree), tree)
        whole, _ = flat.update(zeros, flat.init(tree), tree)
        for one, other, before, here in zip(*map(leaves, (got, whole, tree)), decays, strict=True):
            assert torch.equal(one, other if here else before)


def leaves(tree):
    return [*tree["a"], tree["b"]]


@pytest.mark.parametrize(
    "mask, error, text",
    [
        ({"w": True}, TypeError, "mask: got .* of type dict, expected a function"),
        (
            lambda params: {"w": True},
            ValueError,
            "mask: got .*, expected booleans in the structure of the parameters",
        ),
        (lambda params: {name: 0.5 for name in params}, TypeError, "expected a boolean for every parameter"),
        (lambda params: None, ValueError, "expected booleans in the structure"),
    ],
)
def test_masks_of_another_form_are_named(mask, error, text):
    with pytest.raises(error, match=text):
        optimizer = pp.optim.adamw(0.1, mask=mask)
        optimizer.update(grads(), optimizer.init(params()), params())


def test_one_parameter_that_is_frozen_at_one_of_its_places_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    model[0].weight.requires_grad_(False)
    model[1].weight.data = model[0].weight.data.clone()
    made = [pp.stage_from_module(part) for part in model]
    options = {"tied": {"w": [(0, "weight"), (1, "weight")]}}
    given = {s: own for s, (_, own, _) in enumerate(made)}

    def stepped():
        trainer = new_trainer(
            [fn for fn, _, _ in made], squared, pp.gpipe(2, 2), pp.optim.sgd(0.1), **options
        )
        return trainer.step(trainer.init(given), normal(4, 3), normal(4, 3, seed=1))

    with pytest.raises(
        ValueError, match=r"tied\['w'\]: weight of stage 0 is frozen, weight of stage 1 is not"
    ):
        stepped()
    model[1].weight.requires_grad_(False)
    state, _ = stepped()
    assert torch.equal(state.params[0]["weight"], given[0]["weight"]) and torch.equal(
        state.params[1]["weight"], given[0]["weight"]
    )


def test_a_mask_by_size_is_refused():
    """Where parameters are sharded, a rank would decide by the size of its part."""
    optimizer = pp.optim.adamw(0.1, mask=lambda params: {name: p.numel() > 4 for name, p in params.items()})
    with pytest.raises(ValueError, match="mask: .* got 'numel' of a parameter, expected ndim or dtype"):
        optimizer.init(params())
