"""Optimizers give torch's numbers, leave what they were given alone, and say what does not fit."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, strategies as st

from ppfunc.training import adamw, sgd


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def tree(dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    return {"w": make(4, 3), "more": [make(5), Pair(make(()), make(2, 0))], "nothing": None}


def leaves(params):
    return [params["w"], params["more"][0], *params["more"][1]]


def gradients(step, dtype=torch.float64):
    return tree(dtype, seed=100 + step)


def reference(make, params, steps, grads=gradients, dtype=torch.float64):
    """The parameters after each step of a torch optimizer."""
    own = [p.clone().requires_grad_() for p in leaves(params)]
    optimizer = make(own)
    for step in range(steps):
        for p, g in zip(own, leaves(grads(step, dtype)), strict=True):
            p.grad = g
        optimizer.step()
        yield [p.detach().clone() for p in own]


def follow(optimizer, params, steps, grads=gradients, dtype=torch.float64):
    state = optimizer.init(params)
    for step in range(steps):
        params, state = optimizer.update(grads(step, dtype), state, params)
        yield [p.clone() for p in leaves(params)]


PAIRS = {
    "adamw": (lambda: adamw(0.1), lambda p: torch.optim.AdamW(p, lr=0.1)),
    "adamw options": (
        lambda: adamw(0.02, (0.8, 0.95), 1e-3, 0.3),
        lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.3),
    ),
    "adamw donated": (lambda: adamw(0.1, donate=True), lambda p: torch.optim.AdamW(p, lr=0.1)),
    "sgd": (lambda: sgd(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "sgd decay": (lambda: sgd(0.1, weight_decay=0.2), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.2)),
    "sgd momentum": (
        lambda: sgd(0.1, 0.9, 0.2, dampening=0.5),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.2, dampening=0.5),
    ),
    "sgd nesterov": (
        lambda: sgd(0.1, 0.9, nesterov=True, donate=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_same_numbers_as_torch(name):
    ours, theirs = PAIRS[name]
    expected = list(reference(theirs, tree(), 6))
    for got, want in zip(follow(ours(), tree(), 6), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_same_bits_as_the_fused_kernel_of_torch(dtype):
    theirs = lambda p: torch.optim.AdamW(p, lr=0.1, fused=True)  # noqa: E731
    expected = list(reference(theirs, tree(dtype), 4, dtype=dtype))
    for got, want in zip(follow(adamw(0.1), tree(dtype), 4, dtype=dtype), expected, strict=True):
        assert all(a.dtype == dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_mixed_dtypes_and_integer_leaves():
    params = {"half": torch.ones(3, dtype=torch.bfloat16), "full": torch.ones(3), "ids": torch.arange(3)}
    grads = {"half": torch.ones(3, dtype=torch.bfloat16), "full": torch.ones(3), "ids": torch.zeros(3)}
    grads["ids"] = torch.zeros_like(params["ids"])
    optimizer = adamw(0.25, weight_decay=0.0)
    state = optimizer.init(params)
    assert state["mean"]["ids"] is None and state["mean"]["half"].dtype == torch.bfloat16
    new, state = optimizer.update(grads, state, params)
    assert new["ids"] is params["ids"]
    assert new["half"].dtype == torch.bfloat16
    torch.testing.assert_close(new["half"].float(), torch.full((3,), 0.75))
    torch.testing.assert_close(new["full"], torch.full((3,), 0.75))


def test_complex_leaves_are_pairs_of_reals():
    z = torch.randn(4, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    optimizer = adamw(0.1)
    params = {"z": z, "real": torch.view_as_real(z).clone()}
    grads = {"z": z.conj(), "real": torch.view_as_real(z.conj().resolve_conj()).clone()}
    new, _ = optimizer.update(grads, optimizer.init(params), params)
    torch.testing.assert_close(torch.view_as_real(new["z"]), new["real"], rtol=1e-14, atol=0)
    lazy, _ = optimizer.update({"z": z}, optimizer.init({"z": z}), {"z": z.conj()})
    plain, _ = optimizer.update({"z": z}, optimizer.init({"z": z}), {"z": z.conj().resolve_conj()})
    assert torch.equal(lazy["z"], plain["z"])


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize("view", [lambda x: x.T, lambda x: x[::2, 1:], lambda x: x])
def test_layout_in_memory_does_not_matter(make, view, donate):
    base = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    optimizer = make(0.1, donate=donate)
    plain, viewed = view(base).contiguous().clone(), view(base.clone())
    states = optimizer.init([plain]), optimizer.init([viewed])
    gradient = plain.cos()
    expected, _ = optimizer.update([gradient], states[0], [plain])
    got, _ = optimizer.update([gradient], states[1], [viewed])
    assert torch.equal(got[0], expected[0])


@pytest.mark.parametrize("make", [lambda: adamw(0.1), lambda: sgd(0.1, 0.9)])
def test_inputs_are_left_alone(make):
    optimizer, params = make(), tree()
    state, grads = optimizer.init(params), gradients(0)
    for _ in range(2):
        before = [x.clone() for x in (*leaves(params), *leaves(grads), state["updates"])]
        new, after = optimizer.update(grads, state, params)
        again, _ = optimizer.update(grads, state, params)
        assert all(map(torch.equal, leaves(new), leaves(again)))
        assert all(map(torch.equal, before, (*leaves(params), *leaves(grads), state["updates"])))
        params, state = new, after


def test_donation_updates_in_place():
    optimizer, params = adamw(0.1, donate=True), tree()
    before = params["w"].clone()
    new, _ = optimizer.update(gradients(0), optimizer.init(params), params)
    assert new["w"].data_ptr() == params["w"].data_ptr()
    assert not torch.equal(params["w"], before)


def test_donated_memory_must_belong_to_one_leaf():
    w = torch.ones(3)
    optimizer = sgd(0.1, donate=True)
    with pytest.raises(ValueError, match=r"params\['a'\] and params\['b'\] share their memory"):
        optimizer.update({"a": w, "b": w}, optimizer.init({"a": w, "b": w}), {"a": w, "b": w})


def test_modules_parameters_come_back_without_a_graph():
    weight = torch.nn.Parameter(torch.ones(3))
    new, _ = sgd(0.5).update([torch.ones(3)], sgd(0.5).init([weight]), [weight])
    assert not new[0].requires_grad and new[0].tolist() == [0.5] * 3
    assert weight.tolist() == [1.0] * 3


@given(st.lists(st.floats(0.001, 0.5), min_size=1, max_size=4))
def test_learning_rate_may_follow_the_count(rates):
    params = [torch.tensor(1.0, dtype=torch.float64)]
    optimizer = sgd(lambda count: rates[count])
    state = optimizer.init(params)
    for _ in rates:
        params, state = optimizer.update([torch.tensor(1.0, dtype=torch.float64)], state, params)
    assert params[0].item() == pytest.approx(1 - sum(rates), abs=1e-12)
    assert int(state["updates"]) == len(rates)


@pytest.mark.parametrize("make", [lambda: adamw(0.1), lambda: sgd(0.1, 0.9), lambda: sgd(0.1)])
def test_training_goes_on_from_a_file(make, tmp_path):
    """Under the default of ``torch.load``, which takes no classes of ours."""
    optimizer, params = make(), {0: {"w": torch.ones(3), "ids": torch.arange(3)}}
    grads = {0: {"w": torch.full((3,), 0.5), "ids": torch.zeros_like(params[0]["ids"])}}
    params, state = optimizer.update(grads, optimizer.init(params), params)
    torch.save((params, state), tmp_path / "checkpoint.pt")
    loaded, again = torch.load(tmp_path / "checkpoint.pt")
    expected, _ = optimizer.update(grads, state, params)
    got, after = optimizer.update(grads, again, loaded)
    assert torch.equal(got[0]["w"], expected[0]["w"]) and int(after["updates"]) == 2


def test_empty_tree():
    optimizer = adamw(0.1)
    assert optimizer.update({}, optimizer.init({}), {})[0] == {}


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        ({"v": torch.ones(3)}, "structure of params"),
        ({"w": torch.ones(4)}, r"grads\['w'\] must match its parameter: got torch.float32\[4\]"),
        ({"w": torch.ones(3, dtype=torch.float64)}, r"expected torch.float32\[3\]"),
    ],
)
def test_gradients_that_do_not_fit(grads, message):
    params, optimizer = {"w": torch.ones(3)}, adamw(0.1)
    with pytest.raises(ValueError, match=message):
        optimizer.update(grads, optimizer.init(params), params)


def test_nesterov_needs_momentum():
    with pytest.raises(ValueError, match="got momentum=0.0"):
        sgd(0.1, nesterov=True)
