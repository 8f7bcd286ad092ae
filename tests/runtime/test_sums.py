"""The dtype in which gradients are added up over microbatches."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st

import ppfunc as pp
from ppfunc.runtime.running import calls
from ppfunc.runtime.running.calls import Sum
from ppfunc.runtime.running.execute import Owned
from tests.models import normal

D, M = 8, 64
BF16 = torch.bfloat16


def stage(params, x):
    return torch.tanh(x @ params["w"]) + (params["b"] if len(x) > 2 else 0)


def loss_fn(y, target):
    return (y.float() - target).square().mean()


def problem(ranks):
    params = {
        s: {"w": normal(D, D, seed=s).to(BF16), "b": normal(D, seed=9).to(BF16), "n": torch.tensor(3)}
        for s in range(ranks)
    }
    return params, normal(3 * M, D, seed=7).to(BF16), normal(3 * M, D, seed=8).float()


def exact(params, inputs, targets, ranks):
    """The gradients of the microbatches, each as the stages give them, added up in float64."""
    step = pp.value_and_grad([stage] * ranks, loss_fn, pp.gpipe(ranks, M), per_microbatch=True)
    return {
        s: {k: g.double().sum(0) for k, g in tree.items()}
        for s, tree in step(params, inputs, targets)[1].items()
    }


def worst(grads, wanted):
    return max(
        (g.double() - wanted[s][k]).abs().max().item() for s, tree in grads.items() for k, g in tree.items()
    )


@pytest.mark.parametrize("engine", [pp.engines.graph, pp.engines.functional, pp.engines.eager])
@pytest.mark.parametrize(
    "schedule", [pp.one_f_one_b(2, M), pp.zb_h1(2, M), pp.dualpipe(2, M)], ids=lambda s: s.name
)
def test_sums_of_narrow_gradients_are_as_wide_as_asked_for(schedule, engine):
    arguments = problem(2)
    wanted = exact(*arguments, 2)
    _, narrow = pp.value_and_grad([stage] * 2, loss_fn, schedule, engine=engine)(*arguments)
    _, wide = pp.value_and_grad([stage] * 2, loss_fn, schedule, engine=engine, sum_dtype=torch.float32)(
        *arguments
    )
    assert {g.dtype for tree in narrow.values() for k, g in tree.items() if k != "n"} == {BF16}
    assert {g.dtype for tree in wide.values() for k, g in tree.items() if k != "n"} == {torch.float32}
    assert all(tree["n"].dtype == torch.int64 for tree in wide.values())
    assert worst(wide, wanted) < 1e-6 < 1e-4 < worst(narrow, wanted)


def test_wider_parameters_keep_their_dtype_and_bits():
    params, inputs, targets = problem(2)
    params = {s: {k: t.double() if k == "w" else t for k, t in tree.items()} for s, tree in params.items()}
    fns = [lambda p, x: torch.tanh(x.double() @ p["w"]).to(BF16) + p["b"]] * 2
    _, plain = pp.value_and_grad(fns, loss_fn, pp.gpipe(2, M))(params, inputs, targets)
    _, wide = pp.value_and_grad(fns, loss_fn, pp.gpipe(2, M), sum_dtype=torch.float32)(
        params, inputs, targets
    )
    assert wide[0]["w"].dtype == torch.float64 and wide[0]["b"].dtype == torch.float32
    assert torch.equal(wide[0]["w"], plain[0]["w"])


@pytest.mark.filterwarnings("ignore:.*nothing depends on")
def test_microbatches_without_a_gradient_count_as_zero():
    params, inputs, targets = problem(2)
    sizes = [3, 2] * (M // 2)
    cut = [pp.Microbatches(list(t[: sum(sizes)].split(sizes))) for t in (inputs, targets)]
    _, wide = pp.value_and_grad([stage] * 2, loss_fn, pp.gpipe(2, M), sum_dtype=torch.float32)(params, *cut)
    _, apart = pp.value_and_grad([stage] * 2, loss_fn, pp.gpipe(2, M), per_microbatch=True)(params, *cut)
    assert (
        worst(wide, {s: {k: g.double().sum(0) for k, g in tree.items()} for s, tree in apart.items()}) < 1e-6
    )


LEAVES = 4


def gradients_of(seed):
    """One of each kind: whole, the same as another's, a row of many, in another dtype."""
    base = normal(3, 2, seed=seed)
    return base, base, normal(1, 2, seed=50 + seed).expand(3, 2), normal(3, 2, seed=90 + seed).to(BF16)


@given(
    st.lists(
        st.tuples(st.permutations(range(LEAVES)), st.sets(st.integers(1, LEAVES))), min_size=1, max_size=2
    ),
    st.data(),
)
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_gradients_may_come_in_any_parts(dtype, ways, data):
    """The sums have the bits of one after the other, in memory of their own, and nothing that came is
    changed.
    """
    sums, wanted, came, copies = Sum(dtype), [None] * LEAVES, [], []
    for seed in range(data.draw(st.integers(0, 5))):
        order, cuts = data.draw(st.sampled_from(ways))
        for numbers in (tuple(order[a:b]) for a, b in pairwise([0, *sorted(cuts)])):
            made = [gradients_of(seed)[n] for n in numbers]
            came, copies = came + made, copies + [g.clone() for g in made]
            sums.add(made, numbers, seed)
            for n, g in zip(numbers, made, strict=True):
                g = g.to(torch.promote_types(g.dtype, dtype or g.dtype)) if wanted[n] is None else g
                wanted[n] = g if wanted[n] is None else wanted[n] + g
    like = gradients_of(0)
    taken = sums.take(like, Owned(came))
    assert all(map(torch.equal, came, copies))
    assert not {t.untyped_storage().data_ptr() for t in taken} & {
        g.untyped_storage().data_ptr() for g in came
    }
    assert len({t.untyped_storage().data_ptr() for t in taken}) == LEAVES
    for one, other, leaf in zip(taken, wanted, like, strict=True):
        other = (
            torch.zeros_like(leaf, dtype=torch.promote_types(leaf.dtype, dtype or leaf.dtype))
            if other is None
            else other
        )
        assert one.dtype == other.dtype and torch.equal(one, other)


def in_processes(rank, ranks):
    """Replicas send their sums as they are."""
    arguments = problem(ranks)
    schedule = pp.dualpipe(ranks, M)
    _, alone = pp.value_and_grad([stage] * ranks, loss_fn, schedule, sum_dtype=torch.float32)(*arguments)
    with pp.P2P(timeout=60) as transport:
        _, grads = pp.value_and_grad([stage] * ranks, loss_fn, schedule, transport, sum_dtype=torch.float32)(
            *arguments
        )
    assert all(torch.equal(grads[s][k], alone[s][k]) for s in grads for k in grads[s])


def test_sums_over_replicas(two):
    two(in_processes)


def test_what_would_add_nothing_up_is_refused():
    for wrong, options in (
        (torch.int32, {}),
        ("float32", {}),
        (torch.float16, {}),
        (torch.float32, {"argnums": 1}),
        (torch.float32, {"per_microbatch": True}),
    ):
        with pytest.raises((TypeError, ValueError), match="sum_dtype"):
            pp.value_and_grad([stage] * 2, loss_fn, pp.gpipe(2, M), sum_dtype=wrong, **options)


def test_views_of_parameters_among_residuals_come_back_where_they_lay():
    w, key, low = normal(5), (0, 0), SimpleNamespace(model_stage=0)
    buffers = SimpleNamespace(params={0: (w,)}, residuals={key: (w[2:], w[::2], w.sum())})
    kept = buffers.residuals[key]
    calls.release_params(low, key, buffers)
    assert [isinstance(t, calls.Held) for t in buffers.residuals[key]] == [True, True, False]
    calls.restore_params(low, key, buffers)
    assert all(map(torch.equal, buffers.residuals[key], kept))
