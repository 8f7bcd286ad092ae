"""Optimizers give torch's numbers, leave what they were given alone, and say what does not fit."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, strategies as st

from ppfunc.stage.tree import tree_leaves, tree_map, tree_structure
from ppfunc.training import dynamic_scale
from ppfunc.training.optim import (
    Optimizer,
    adamw,
    chain,
    clip_by_global_norm,
    from_updates,
    global_norm,
    linear,
    sgd,
    warmup_cosine,
)
from ppfunc.training.optim.optimizer import skipping
from ppfunc.training.update.buckets import shard
from ppfunc.training.update.precision import cast, overflow
from tests.models import same_bits
from tests.training.world import Reads


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
        lambda: sgd(0.1, 0.9, 0.2),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.2),
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("momentum, nesterov", [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_of_halves_is_that_of_float64(dtype, momentum, nesterov):
    """The kernel of torch for the CPU mixes up the elements of whole vectors: off by 0.4, and by infinity."""
    g = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(67, generator=g).to(dtype)  # noqa: E731
    params, grads, buffer = draw(), draw(), draw()
    optimizer = sgd(0.1, momentum, 0.2, nesterov=nesterov)
    state = optimizer.init([params]) | ({"momentum": [buffer]} if momentum else {})
    (got,), _ = optimizer.update([grads], state, [params])
    change = grads.double() + 0.2 * params.double()
    total = momentum * buffer.double() + change
    want = params.double() - 0.1 * (change + momentum * total if nesterov else total)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=eps, atol=eps)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make", [lambda: adamw(0.1), lambda: sgd(0.1, 0.9, 0.2), lambda: sgd(0.1, 0.9, nesterov=True)]
)
@given(st.data())
def test_updates_of_shards_are_those_of_the_whole(make, dtype, data):
    """Whatever vectors the kernels work on, and whatever dimension is cut."""
    ranks, dim = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 2))
    shapes = [
        tuple(n * ranks if d == dim else n for d, n in enumerate(shape))
        for shape in data.draw(st.lists(st.tuples(*[st.integers(1, 5)] * 3), min_size=1, max_size=3))
    ]
    g = torch.Generator().manual_seed(0)
    values = lambda: [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]  # noqa: E731
    dims = (dim if ranks > 1 else None,) * len(shapes)
    optimizer, whole = make(), values()
    parts = [list(shard(whole, dims, ranks, rank)) for rank in range(ranks)]
    states, state = [optimizer.init(own) for own in parts], optimizer.init(whole)
    for _ in range(3):
        grads = values()
        given_too = {"found_inf": torch.tensor(0.0)} if data.draw(st.booleans()) else {}
        for rank in range(ranks):
            own = shard(grads, dims, ranks, rank)
            parts[rank], states[rank] = optimizer.update(list(own), states[rank], parts[rank], **given_too)
        whole, state = optimizer.update(grads, state, whole, **given_too)
        eps = torch.finfo(dtype).eps
        for n, p in enumerate(whole):
            joined = torch.cat([own[n] for own in parts], dim) if ranks > 1 else parts[0][n]
            torch.testing.assert_close(joined, p, rtol=8 * eps, atol=8 * eps)


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
    optimizer, state = adamw(0.1, donate=True), adamw(0.1).init({"a": w})
    with pytest.raises(ValueError, match=r"mean\['a'\] and square\['a'\] share their memory"):
        optimizer.update({"a": w}, {**state, "square": state["mean"]}, {"a": w})


def test_modules_parameters_come_back_without_a_graph():
    weight = torch.nn.Parameter(torch.ones(3))
    new, _ = sgd(0.5).update([torch.ones(3)], sgd(0.5).init([weight]), [weight])
    assert not new[0].requires_grad and new[0].tolist() == [0.5] * 3
    assert weight.tolist() == [1.0] * 3


def overflowing(grads):
    return {**grads, "w": grads["w"] * float("inf")}


def everything(params, state):
    return [leaf.clone() for leaf in tree_leaves((params, state))]


SKIPPING = {
    "adamw": lambda donate: adamw(0.1, donate=donate),
    "sgd": lambda donate: sgd(0.1, donate=donate),
    "sgd momentum": lambda donate: sgd(0.1, 0.9, 0.2, donate=donate),
    "sgd nesterov": lambda donate: sgd(0.1, 0.9, nesterov=True, donate=donate),
    "chain": lambda donate: chain(clip_by_global_norm(1.0), adamw(0.1, donate=donate)),
    "updates": lambda donate: from_updates(
        Optimizer(
            lambda params: {"count": torch.tensor(0)},
            lambda g, s, params: (tree_map(lambda x: -0.1 * x, g), {"count": s["count"] + 1}),
        )
    ),
    "plain": lambda donate: skipping(Optimizer(adamw(0.1).init, lambda g, s, p: adamw(0.1).update(g, s, p))),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", SKIPPING)
def test_nothing_changes_where_gradients_overflow(name, donate, dtype):
    """On the first step too, of which torch's SGD and Adam make much."""
    plain, skips, one = SKIPPING[name](False), SKIPPING[name](donate), torch.tensor(1.0)
    expected, params = cast(tree(), dtype), cast(tree(), dtype)
    states = plain.init(expected), skips.init(params)
    for step, bad in enumerate((True, False, True, True, False, False)):
        grads = cast(gradients(step), dtype)
        given = overflowing(grads) if bad else grads
        before, kept = everything(params, states[1]), [g.clone() for g in leaves(given)]
        params, after = skips.update(given, states[1], params, found_inf=one if bad else 1 - one)
        assert all(map(torch.equal, kept, leaves(given)))
        if bad:
            assert all(map(torch.equal, everything(params, after), before))
        else:
            expected, first = plain.update(grads, states[0], expected)
            states = (first, after)
            assert all(map(torch.equal, everything(params, after), everything(expected, first)))
        states = (states[0], after)


@pytest.mark.parametrize("name", SKIPPING)
def test_no_value_is_read_by_the_host(name):
    optimizer, params = SKIPPING[name](False), tree()
    state = optimizer.init(params)
    with Reads() as reads:
        for step in range(2):
            found_inf = overflow(global_norm(gradients(step)))
            params, state = optimizer.update(gradients(step), state, params, found_inf=found_inf)
    assert reads.found == []
    with Reads() as reads:
        params, state = adamw(warmup_cosine(0.1, 2, 5)).update(gradients(0), adamw(0.1).init(tree()), tree())
        dynamic_scale().update(dynamic_scale().init("cpu"), overflow(params["w"].sum()))
    assert reads.found == []
    with Reads() as reads:
        float(params["w"].sum())
    assert len(reads.found) == 1


@pytest.mark.parametrize("rate", [linear(0.1, 0.0, 4), warmup_cosine(0.1, 2, 5)])
def test_rates_as_torch_takes_them(rate):
    def theirs(p):
        return torch.optim.AdamW(p, lr=1.0)

    own = [p.clone().requires_grad_() for p in leaves(tree())]
    optimizer = torch.optim.AdamW(own, lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: rate(torch.tensor(n)).item())
    for step, got in enumerate(follow(adamw(rate), tree(), 6)):
        for p, g in zip(own, leaves(gradients(step)), strict=True):
            p.grad = g
        optimizer.step()
        schedule.step()
        torch.testing.assert_close(got, [p.detach() for p in own], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", SKIPPING)
def test_the_state_is_tensors_that_torch_loads_by_default(name, tmp_path):
    optimizer, params = (
        SKIPPING[name](False),
        {"w": torch.ones(2, 3), "more": [torch.ones(()), None], "ids": torch.arange(3)},
    )
    state = optimizer.init(params)
    assert all(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(state))
    torch.save(state, tmp_path / "state")
    loaded = torch.load(tmp_path / "state")
    assert tree_structure(loaded) == tree_structure(state)
    grads = tree_map(torch.ones_like, params)
    got, expected = optimizer.update(grads, loaded, params)[0], optimizer.update(grads, state, params)[0]
    assert same_bits(got, expected)
    assert got["ids"] is params["ids"]


def test_an_optimizer_that_writes_into_its_arguments_cannot_skip():
    def update(grads, state, params):
        for p, g in zip(tree_leaves(params), tree_leaves(grads), strict=True):
            p.sub_(g)
        return params, state

    optimizer = skipping(Optimizer(lambda params: {}, update))
    assert optimizer.update([torch.ones(2)], {}, [torch.ones(2)])[0][0].tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="written into its arguments, which are still needed"):
        optimizer.update([torch.ones(2)], {}, [torch.ones(2)], found_inf=torch.tensor(0.0))


@pytest.mark.parametrize("name", ["adamw", "sgd momentum", "chain"])
def test_odd_leaves(name):
    """One row, no dimension, nothing, integers, complex numbers, and several dtypes."""
    params = {
        "row": torch.ones(1, 3, dtype=torch.float64),
        "scalar": torch.tensor(2.0),
        "nothing": torch.ones(0, 3),
        "ids": torch.arange(4),
        "z": torch.ones(2, dtype=torch.complex128),
        "half": torch.ones(2, dtype=torch.bfloat16),
    }
    optimizer = SKIPPING[name](True)
    state = optimizer.init(params)
    alone = {k: tree_map(torch.clone, {k: p}) for k, p in params.items()}
    states = {k: optimizer.init(p) for k, p in alone.items()}
    for _ in range(3):
        grads = {
            k: torch.full_like(p, 1e-3) if k != "ids" else torch.zeros_like(p) for k, p in params.items()
        }
        for k in alone:
            alone[k], states[k] = optimizer.update({k: grads[k]}, states[k], alone[k])
        params, state = optimizer.update(grads, state, params)
    assert all(torch.equal(params[k], alone[k][k]) for k in params)


def test_a_new_form_is_seen():
    """What is known of the last trees is not taken for the next."""
    optimizer = adamw(0.1, donate=True)
    for make in (
        lambda: torch.ones(3, 2).T,
        lambda: torch.ones(2, 3),
        lambda: torch.ones(2, 3, dtype=torch.float64),
        lambda: torch.ones(6),
    ):
        params = {"w": make()}
        new, _ = optimizer.update({"w": torch.ones_like(make())}, optimizer.init(params), params)
        torch.testing.assert_close(new["w"], make() * 0.9 - make() * 0.001)
    state = optimizer.init({"w": torch.ones(3)})
    with pytest.raises(ValueError, match=r"mean\['w'\] must match its parameter: got torch.float32\[3\]"):
        optimizer.update({"w": torch.ones(4)}, state, {"w": torch.ones(4)})


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        ({"v": torch.ones(3)}, "structure of params"),
        ({"w": {"v": torch.ones(3)}}, "structure of params"),
        ({"w": None}, "structure of params"),
        ({"w": torch.ones(4)}, r"grads\['w'\] must match its parameter: got torch.float32\[4\]"),
        ({"w": torch.ones(3, dtype=torch.float64)}, r"expected torch.float32\[3\]"),
    ],
)
def test_gradients_that_do_not_fit(grads, message):
    params, optimizer = {"w": torch.ones(3)}, adamw(0.1)
    with pytest.raises(ValueError, match=message):
        optimizer.update(grads, optimizer.init(params), params)


def test_keys_in_another_order_are_refused_or_sorted():
    """A gradient is not taken for that of another parameter."""
    params, optimizer = {"a": torch.ones(3), "b": torch.ones(3)}, sgd(0.1, 0.9)
    grads = {"b": torch.full((3,), 2.0), "a": torch.zeros(3)}
    state = optimizer.init(params)
    state["momentum"] = {"b": torch.full((3,), 4.0), "a": torch.zeros(3)}
    with pytest.raises(ValueError, match="structure of params"):
        optimizer.update(grads, state, params)
    new, after = optimizer.update({n: grads[n] for n in "ab"}, state, params)
    assert new["a"].tolist() == [1.0] * 3 and after["momentum"]["b"].tolist() == pytest.approx([5.6] * 3)
