"""Ranks of a mesh that fail, overflow or call apart: all of them are told, and the next step is right."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ppfunc as pp
from tests.models import new_trainer, same_bits, squared
from tests.training.trainer.problems import problem


def failing(rank, size):
    """One rank of the second pipeline fails in a stage, once; then it overflows, alone; then all is well
    again.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    calls = []

    def stage(params, x):
        calls.append(None)
        if rank == 3 and len(calls) == 3:
            raise ValueError("on purpose")
        return torch.tanh(x @ params["w"])

    _, params, x, y = problem(2)
    schedule, pipe = pp.one_f_one_b(2, 4), mesh.get_local_rank("pp")
    options = {"axes": pp.Axes("pp", "dp"), "engine": pp.engines.functional, "scale": pp.dynamic_scale()}
    with new_trainer([stage] * 2, squared, schedule, pp.optim.sgd(1e-2), mesh, **options) as trainer:
        state = trainer.init({pipe: params[pipe]})
        began = time.monotonic()
        with pytest.raises(pp.PipelineError, match=r"rank 3 failed at .* on purpose") as caught:
            for _ in range(3):
                trainer.step(state, x, y)
        seconds = time.monotonic() - began
        bad = x * math.inf if mesh.get_local_rank("dp") == 1 else x
        same, metrics = trainer.step(state, bad, y)
        assert (metrics.skipped, same.step, same.scale["scale"]) == (1, 0, 2.0**15)
        assert same_bits(same.params, state.params)
        after, _ = trainer.step(state, x, y)
    return caught.value.rank, seconds, after.params[pipe]["w"]


def test_a_failure_in_one_pipeline_fails_all_and_an_overflow_skips_all(four, soon):
    answers = four(failing)
    assert all(rank == 3 and seconds < soon for rank, seconds, _ in answers)
    for one, other in ((0, 1), (2, 3)):
        assert torch.equal(answers[one][2], answers[other][2])


def disagreeing(rank, size):
    """Ranks that compute parts of the same stage are given other batches: nothing is trained on them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stages, params, x, y = problem(2)
    pipe = mesh.get_local_rank("pp")
    rows = x if mesh.get_local_rank("tp") else x[:16]
    with (
        new_trainer(
            stages, squared, pp.one_f_one_b(2, 4), pp.optim.sgd(1e-2), mesh, axes=pp.Axes("pp", model="tp")
        ) as trainer,
        pytest.raises(pp.AgreementError, match="4 microbatches of"),
    ):
        trainer.step(trainer.init({pipe: params[pipe]}), rows, y if mesh.get_local_rank("tp") else y[:16])


def test_parts_of_a_stage_run_the_same_batch(four):
    four(disagreeing)


def calls_apart(rank, size, kind):
    """Data ranks that call for other steps; or gradients of which those of one stage alone are no numbers."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    _, params, x, y = problem(2)
    pipe, data = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")

    def stage(p, x):
        return torch.tanh(x @ p["w"]) + (
            0 * torch.sqrt(p["w"].sum() * 0) if kind == "nan" and pipe == 1 else 0
        )

    options = {"axes": pp.Axes("pp", "dp"), "norm_type": math.inf, "engine": pp.engines.functional}
    with new_trainer(
        [stage] * 2, squared, pp.one_f_one_b(2, 4), pp.optim.sgd(1e-2), mesh, **options
    ) as trainer:
        own = {pipe: {"w": params[pipe]["w"].float() if kind == "dtype" and data else params[pipe]["w"]}}
        state = trainer.init(own)
        if kind == "nan":
            after, metrics = trainer.step(state, x, y)
            return (
                metrics.skipped.item(),
                metrics.grad_norm.isnan().item(),
                same_bits(after.params, state.params),
            )
        with pytest.raises(pp.AgreementError, match="disagree"):
            if kind in ("weights", "evaluation"):
                call = trainer.step if kind == "weights" else trainer.evaluate
                call(state, x, y, loss_weights=[1, 2, 3, 4] if data else None)
            elif kind == "steps":
                trainer.steps(state, [(x, y)] * (2 + data))
            else:
                trainer.step(state, x.to(own[pipe]["w"].dtype), y.to(own[pipe]["w"].dtype))
    return None


@pytest.mark.parametrize("kind", ["weights", "evaluation", "steps", "dtype"])
def test_data_ranks_that_call_apart_are_told_so(four, kind):
    four(calls_apart, kind)


def test_a_gradient_of_one_stage_that_is_no_number_skips_the_update_under_every_norm(four):
    assert four(calls_apart, "nan") == [(1.0, True, True)] * 4


def evaluating(rank, size):
    """Pipelines of one rank each: one evaluates where the other trains."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    stages, params, x, y = problem(1)
    with pytest.raises(ValueError, match="shard: got 'params', and no axis of data ranks"):
        pp.P2P(mesh=mesh["pp"], axes=pp.Axes("pp"), shard="params")
    with new_trainer(
        stages, squared, pp.gpipe(1, 4), pp.optim.sgd(1e-2), mesh, axes=pp.Axes("pp", "dp"), shard="params"
    ) as trainer:
        state = trainer.init(params)
        again = trainer.init(state.params)  # parts as this trainer keeps them
        assert again.params[0]["w"].placements == state.params[0]["w"].placements
        with (
            new_trainer(
                stages, squared, pp.gpipe(1, 4), pp.optim.sgd(1e-2), mesh, axes=pp.Axes("pp", "dp")
            ) as other,
            pytest.raises(ValueError, match="got parts over the axis 'dp', expected whole parameters"),
        ):
            other.init(state.params)
        trainer.step(state, x, y)
        with pytest.raises(pp.AgreementError, match=r"\(evaluation of trainer of loss\)"):
            trainer.evaluate(state, x, y) if rank else trainer.step(state, x, y)


def test_pipelines_of_one_rank_agree_too(two):
    two(evaluating)


def overflowing(rank, size):
    """The gradient of a part of a stage is no number, on one rank alone."""
    mesh, (_, params, x, y) = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp")), problem(2)
    pipe, odd = mesh.get_local_rank("pp"), None
    own = params[pipe] | {"v": DTensor.from_local(torch.ones(2, dtype=torch.float64), mesh["tp"], [Shard(0)])}

    def stage(p, x):
        return torch.tanh(x @ p["w"]) + torch.sqrt(p["v"].sum() * (0 if rank == odd else 1)) * 0

    options = {"axes": pp.Axes("pp", model="tp"), "engine": pp.engines.functional}
    with new_trainer(
        [stage] * 2, squared, pp.one_f_one_b(2, 4), pp.optim.sgd(1e-2), mesh, **options
    ) as trainer:
        state = trainer.init({pipe: own})
        for odd in (0, 1, 2, 3, None):
            after, metrics = trainer.step(state, x, y)
            assert metrics.loss.isfinite() and metrics.skipped == (odd is not None)
            assert same_bits(after.params, state.params) == (odd is not None)


def test_an_overflow_of_one_rank_of_any_axis_skips_the_update_on_all(four):
    four(overflowing)


def noisy(grads, state, params):
    return {name: p - 0.1 * grads[name] + 0.01 * torch.randn_like(p) for name, p in params.items()}, state


DIVIDING = {
    "noise": pp.optim.Optimizer(lambda params: {}, noisy),
    "groups": pp.optim.by_name({"e": pp.optim.sgd(0.5), "*": pp.optim.sgd(0.01)}),
    "mask": pp.optim.adamw(0.1, weight_decay=0.5, mask=lambda p: {name: name != "e" for name in p}),
}


def tied_apart(rank, size, kind):
    """Tie two leaves that the optimizer tells apart by their names, or write into one between comparisons."""
    stages = [lambda p, x: torch.tanh(x @ p["e"]), lambda p, x: x @ p["h"].T]
    schedule, tied = pp.one_f_one_b(2, 4), {"t": [(0, "e"), (1, "h")]}
    params, x = {0: {"e": torch.eye(4)}, 1: {"h": torch.eye(4)}}, torch.ones(8, 4)
    mine = {s: tree for s, tree in params.items() if size == 1 or s == rank}
    optimizer = DIVIDING.get(kind, pp.optim.sgd(0.1))
    transport = pp.InProcess() if size == 1 else pp.P2P()
    with pp.Trainer(stages, squared, schedule, optimizer, transport, tied=tied, checksum_every=2) as trainer:
        state = trainer.init(mine)
        if kind == "written":
            state, _ = trainer.step(state, x, x)
            for s, tree in state.params.items():
                next(iter(tree.values())).mul_(2 + s)
            state, _ = trainer.step(state, x, x)  # the next one compares
        with pytest.raises(pp.AgreementError) as caught:
            trainer.step(state, x, x)
    return str(caught.value)


TOLD = {
    "written": "has other values",
    **dict.fromkeys(DIVIDING, "is updated by the optimizer in another way"),
}


@pytest.mark.parametrize("kind", TOLD)
def test_places_of_a_tied_parameter_that_would_part_are_told(two, kind):
    """Each place went its own way, without a word: groups and masks go by names, and noise is drawn anew."""
    assert f"'t'] {TOLD[kind]} in stage 0 than in stage 1" in tied_apart(0, 1, kind)
    for text in two(tied_apart, kind):
        assert f"'t'] {TOLD[kind]} on rank 0 than on rank 1" in text


def patterned(rank, size):
    """Patterns of names that only one rank of the pipeline has, then some that none has."""
    stages = [lambda p, x: x @ p["e"], lambda p, x: x @ p["h"]]
    params, x = {0: {"e": torch.eye(4)}, 1: {"h": torch.eye(4)}}, torch.ones(8, 4)
    mine = {s: tree for s, tree in params.items() if size == 1 or s == rank}
    sgd, texts = pp.optim.sgd(0.1), []
    by_names = ({"e": sgd, "h": sgd, "*": sgd}, {"e": sgd, "*": pp.optim.by_name({"h": sgd, "head": sgd})})
    for by_name, states in zip((by_names[0], *by_names), (None, {"*count": "sum"}, None), strict=True):
        transport = pp.InProcess() if size == 1 else pp.P2P()
        optimizer = pp.optim.ema(pp.optim.by_name(by_name))
        with pp.Trainer(
            stages, squared, pp.gpipe(2, 4), optimizer, transport, reduce_state=states
        ) as trainer:
            state = trainer.init(mine)
            try:
                state, _ = trainer.step(state, x, x)
                texts.append(int(state.step))
            except (ValueError, pp.PipelineError) as error:  # of this rank, or of the first
                texts.append(str(error))
    return texts


def test_a_pattern_that_takes_nothing_on_any_rank_is_told_on_all(two):
    for taken, states, groups in (*two(patterned), patterned(0, 1)):
        assert taken == 1
        assert "reduce_state: '*count' of '*count' takes no leaf of any rank" in states
        assert "by_name: 'head' of 'h', 'head' takes no leaf of any rank" in groups


def test_groups_of_equal_patterns_do_not_hide_each_other():
    inner = {"h": pp.optim.sgd(0.1), "*": pp.optim.sgd(0.2)}
    optimizer = pp.optim.by_name({"e": pp.optim.by_name(inner), "*": pp.optim.by_name(inner)})
    x, stages = torch.ones(8, 4), [lambda p, x: x @ p["e"] @ p["h"]]
    with pp.Trainer(stages, squared, pp.gpipe(1, 2), optimizer) as trainer:
        state = trainer.init({0: {"e": torch.eye(4), "h": torch.eye(4)}})
        with pytest.raises(ValueError, match=r"groups\['e'\]: by_name: 'h' of 'h', '\*' takes no leaf"):
            trainer.step(state, x, x)


def test_steps_leave_alone_the_generator_of_an_optimizer_that_draws():
    drawn = pp.optim.Optimizer(lambda params: {"r": torch.randn(2)}, lambda g, state, params: (params, state))
    stages, params = [lambda p, x: x @ p["e"]], {0: {"e": torch.eye(4)}}
    with pp.Trainer(stages, squared, pp.gpipe(1, 2), drawn) as trainer:
        state = trainer.init(params)
    with pp.Trainer(stages, squared, pp.gpipe(1, 2), drawn) as trainer:
        before = torch.get_rng_state()
        for rows in (4, 8):  # of a state, then of a batch, that it meets first
            state, _ = trainer.step(state, torch.ones(rows, 4), torch.ones(rows, 4))
        assert torch.equal(before, torch.get_rng_state())


def test_an_alternative_that_takes_nothing_is_told_with_names_that_exist():
    optimizer = pp.optim.by_name({"*norm|b": pp.optim.sgd(0.1), "w|b*": pp.optim.sgd(0.1)})
    with pp.Trainer([lambda p, x: x @ p["w"] + p["b"]], squared, pp.gpipe(1, 1), optimizer) as trainer:
        state, x = trainer.init({0: {"w": torch.eye(4), "b": torch.ones(4)}}), torch.ones(8, 4)
        said = r"by_name: '\*norm' of '\*norm\|b', 'w\|b\*' takes no leaf .* leaves here are 'b', 'w'$"
        with pytest.raises(ValueError, match=said):
            trainer.step(state, x, x)
