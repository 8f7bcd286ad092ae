"""Replicas of a stage: one set of parameters in several processes, compared at every step, with one
gradient.
"""

from __future__ import annotations

import time
from functools import cache, partial
from itertools import product

import pytest
import torch

import ppfunc as pp
from ppfunc.runtime.lowering.lower import routes_of
from ppfunc.runtime.lowering.ties import sharing_ranks
from ppfunc.schedule import chimera, remove_tail
from tests import models
from tests.models import affine, squared, traced_once

D = 4
SCHEDULES = {
    "dualpipe": lambda ranks: pp.dualpipe(ranks, 2 * ranks),
    "chimera": lambda ranks: chimera(ranks, 2 * ranks),
    "data_parallel": lambda ranks: remove_tail(pp.data_parallel(ranks, 2 * ranks)),
}


problem = partial(models.problem, leaves="wb", dtype=torch.float32)


def test_replicas_are_summed_by_one_operation_among_the_ranks_that_hold_them():
    """Every pair of ranks exchanged whole gradients: ``data_parallel(8)`` had 56 connections."""
    schedule = SCHEDULES["data_parallel"](8)
    assert list(routes_of(schedule)) == []
    assert list(sharing_ranks(schedule, ())) == [tuple(range(8))]
    assert list(sharing_ranks(SCHEDULES["dualpipe"](4), ())) == [(0, 3), (1, 2)]


def flipped(t):
    """The tensor with the lowest bit of its last element flipped."""
    bits = t.clone().view(torch.int32)
    bits.view(-1)[-1] ^= 1
    return bits.view(torch.float32)


CHANGES = {
    "transposed": lambda p: p | {"w": p["w"].T},
    "transposed, contiguous": lambda p: p | {"w": p["w"].T.contiguous()},
    "more by one": lambda p: p | {"w": p["w"] + 1},
    "rows in another order": lambda p: p | {"w": p["w"][[1, 0, 2, 3]]},
    "rows exchanged between leaves": lambda p: {"w": torch.cat([p["b"][None], p["w"][1:]]), "b": p["w"][0]},
    "one bit": lambda p: p | {"b": flipped(p["b"])},
    "another dtype": lambda p: p | {"b": p["b"].view(torch.int32)},
    "another leaf": lambda p: p | {"c": torch.zeros(D)},
    "another shape": lambda p: p | {"b": p["b"][None]},
}


@cache
def alone(name, ranks):
    """The loss and the gradients of a step in one process."""
    params, inputs, targets = problem(schedule := SCHEDULES[name](ranks))
    return pp.value_and_grad([affine] * len(params), squared, schedule, engine=traced_once)(
        params, inputs, targets
    )


def replicas_differ(rank, ranks, name, kind, want, wanted):
    """The last rank changes the parameters of its last stage, at the first step and at the third; the others
    are right.
    """
    schedule = SCHEDULES[name](ranks)
    params, inputs, targets = problem(schedule)
    held = {s: params[s] for s in schedule.model_stages_of(rank)}
    changed = dict(held)
    if rank == ranks - 1:
        changed[max(held)] = CHANGES[kind](held[max(held)])
    found = []
    with pp.P2P(timeout=60) as transport:
        step = pp.value_and_grad([affine] * len(params), squared, schedule, transport, engine=traced_once)
        for given in (changed, held, changed, held):
            start = time.perf_counter()
            try:
                loss, grads = step(given, inputs, targets)
            except Exception as error:
                found.append((type(error).__name__, str(error), time.perf_counter() - start))
            else:
                found.append(None)
                assert torch.equal(loss, want)
                assert all(torch.equal(grads[s][leaf], wanted[s][leaf]) for s in held for leaf in ("w", "b"))
    return max(held), found


@pytest.mark.parametrize(
    "ranks, name, kind",
    [
        *((2, "dualpipe", kind) for kind in CHANGES),
        *product([4], SCHEDULES, ("transposed, contiguous", "one bit", "another leaf")),
    ],
)
def test_replicas_with_other_parameters_are_told_on_every_rank_and_the_next_step_is_right(
    request, ranks, name, kind, soon
):
    processes = request.getfixturevalue({2: "two", 4: "four"}[ranks])
    answers = processes(replicas_differ, name, kind, *alone(name, ranks))
    changed = answers[-1][0]
    for _, (first, second, third, fourth) in answers:
        assert second is fourth is None
        for name, text, seconds in (first, third):
            assert name == "AgreementError", text
            told = [f"parameters of stage {changed} differ between the processes that hold them"]
            told += [f"params[{changed}]['{leaf}'] has other values on rank" for leaf in "wb"]
            assert any(words in text for words in told), text
            assert seconds < soon


def same_bits(rank, ranks):
    """Strides, a NaN of the same bits, and a tensor that is a view of another, are no difference."""
    schedule = pp.dualpipe(ranks, 4)
    params, inputs, targets = problem(schedule)
    if rank:
        params = {
            s: {"w": p["w"].T.contiguous().T, "b": torch.cat([p["b"], p["b"]])[D:]} for s, p in params.items()
        }
    for p in params.values():
        p["b"][0] = torch.nan
    with pp.P2P(timeout=60) as transport:
        loss, _ = pp.value_and_grad([affine] * ranks, squared, schedule, transport, engine=traced_once)(
            params, inputs, targets
        )
    assert loss.isnan()


def test_replicas_of_the_same_bits_are_the_same(two):
    two(same_bits)


def judged(rank, ranks, name):
    """An evaluation compares them, too."""
    schedule = SCHEDULES[name](ranks)
    params, inputs, targets = problem(schedule)
    held = {s: params[s] for s in schedule.model_stages_of(rank)}
    wrong = {s: p | {"w": p["w"].T.contiguous()} for s, p in held.items()} if rank else held
    with pp.P2P(timeout=60) as transport:
        judge = pp.evaluate([affine] * len(params), squared, schedule, transport, engine=traced_once)
        loss = judge(held, inputs, targets)
        with pytest.raises(pp.AgreementError, match=r"params\[.\]\['w'\] has other values on rank"):
            judge(wrong, inputs, targets)
        assert torch.equal(judge(held, inputs, targets), loss)


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_evaluation_compares_replicas(two, name):
    two(judged, name)


def apart(rank, ranks, name):
    """Gradients of each microbatch: every process has those of all."""
    schedule = SCHEDULES[name](ranks)
    params, inputs, targets = problem(schedule)
    held = {s: params[s] for s in schedule.model_stages_of(rank)}
    _, wanted = pp.value_and_grad([affine] * len(params), squared, schedule, per_microbatch=True)(
        params, inputs, targets
    )
    with pp.P2P(timeout=60) as transport:
        step = pp.value_and_grad([affine] * len(params), squared, schedule, transport, per_microbatch=True)
        for _ in range(2):
            _, grads = step(held, inputs, targets)
            for s in held:
                assert grads[s]["w"].shape == (schedule.microbatches, D, D)
                assert torch.equal(grads[s]["w"], wanted[s]["w"])


@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_of_each_microbatch_reach_every_replica(two, name):
    two(apart, name)
