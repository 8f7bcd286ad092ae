"""The dtype in which gradients are added up over microbatches."""

from __future__ import annotations

import pytest
import torch

import ppfunc as pp
from tests.models import normal

D, M = 8, 64
BF16 = torch.bfloat16


def stage(params, x):
    return torch.tanh(x @ params["w"]) + (params["b"] if len(x) > 2 else 0)


def loss_fn(y, target):
    return (y.float() - target).square().mean()


def problem(ranks):
    params = {s: {"w": normal(D, D, seed=s).to(BF16), "b": normal(D, seed=9).to(BF16), "n": torch.tensor(3)} for s in range(ranks)}
    return params, normal(3 * M, D, seed=7).to(BF16), normal(3 * M, D, seed=8).float()


def exact(params, inputs, targets, ranks):
    """The gradients of the microbatches, each as the stages give them, added up in float64."""
    step = pp.value_and_grad([stage] * ranks, loss_fn, pp.gpipe(ranks, M), per_microbatch=True)
    return {s: {k: g.double().sum(0) for k, g in tree.items()} for s, tree in step(params, inputs, targets)[1].items()}


def worst(grads, wanted):
    return max((g.double() - wanted[s][k]).abs().max().item() for s, tree in grads.items() for k, g in tree.items())


@pytest.mark.parametrize("engine", [pp.graph, pp.functional, pp.eager])
@pytest.mark.parametrize("schedule", [pp.one_f_one_b(2, M), pp.zb_h1(2, M), pp.dualpipe(2, M)], ids=lambda s: s.name)
def test_sums_of_narrow_gradients_are_as_wide_as_asked_for(schedule, engine):
    arguments = problem(2)
    wanted = exact(*arguments, 2)
    _, narrow = pp.value_and_grad([stage] * 2, loss_fn, schedule, engine=engine)(*arguments)
    _, wide = pp.value_and_grad([stage] * 2, loss_fn, schedule, engine=engine, sum_dtype=torch.float32)(*arguments)
    assert {g.dtype for tree in narrow.values() for k, g in tree.items() if k != "n"} == {BF16}
    assert {g.dtype for tree in wide.values() for k, g in tree.items() if k != "n"} == {torch.float32}
    assert all(tree["n"].dtype == torch.int64 for tree in wide.values())
    assert worst(wide, wanted) < 1e-6 < 1e-4 < worst(narrow, wanted)


def test_wider_parameters_keep_their_dtype_and_bits():
    params, inputs, targets = problem(2)
    params = {s: {k: t.double() if k == "w" else t for k, t in tree.items()} for s, tree in params.items()}
    fns = [lambda p, x: torch.tanh(x.double() @ p["w"]).to(BF16) + p["b"]] * 2
    _, plain = pp.value_and_grad(fns, loss_fn, pp.gpipe(2, M))(params, inputs, targets)
    _, wide = pp.value_and_grad(fns, loss_fn, pp.gpipe(2, M), sum_dtype=torch.float32)(params, inputs, targets)
    assert wide[0]["w"].dtype == torch.float64 and wide[0]["b"].dtype == torch.float32
    assert torch.equal(wide[0]["w"], plain[0]["w"])


@pytest.mark.filterwarnings("ignore:.*nothing depends on")
def test_microbatches_without_a_gradient_count_as_zero():
    params, inputs, targets = problem(2)
    sizes = [3, 2] * (M // 2)
    cut = [pp.Microbatches(list(t[: sum(sizes)].split(sizes))) for t in (inputs, targets)]
    _, wide = pp.value_and_grad([stage] * 2, loss_fn, pp.gpipe(2, M), sum_dtype=torch.float32)(params, *cut)
    _, apart = pp.value_and_grad([stage] * 2, loss_fn, pp.gpipe(2, M), per_microbatch=True)(params, *cut)
    assert worst(wide, {s: {k: g.double().sum(0) for k, g in tree.items()} for s, tree in apart.items()}) < 1e-6


def in_processes(rank, ranks):
    """Replicas send their sums as they are."""
    arguments = problem(ranks)
    schedule = pp.dualpipe(ranks, M)
    _, alone = pp.value_and_grad([stage] * ranks, loss_fn, schedule, sum_dtype=torch.float32)(*arguments)
    with pp.P2P(timeout=60) as transport:
        _, grads = pp.value_and_grad([stage] * ranks, loss_fn, schedule, transport, sum_dtype=torch.float32)(*arguments)
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
        with pytest.raises((TypeError, ValueError), match="sum_dtype: got"):
            pp.value_and_grad([stage] * 2, loss_fn, pp.gpipe(2, M), sum_dtype=wrong, **options)
