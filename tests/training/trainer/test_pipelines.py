"""Pipelines in processes train as one process: random numbers, weights of losses, evaluation, steps that
overlap, groups of a mesh.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import ppfunc as pp
from ppfunc.runtime.step import StepFunction
from ppfunc.stage.tree import tree_leaves
from tests.models import new_trainer, same_bits, squared
from tests.training.trainer.problems import ROWS, STAGES, STEPS, TIED, TOLERANCE, problem, tied_problem, train

SCHEDULES = {
    "interleaved": lambda ranks, m: pp.interleaved_1f1b(ranks, m, STAGES // ranks),
    "zbv": lambda ranks, m: pp.zbv(STAGES // 2, m),
    "dualpipev": lambda ranks, m: pp.dualpipev(STAGES // 2, m),
}

OPTIONS = {
    "plain": {"clip": 0.3},
    "params": {"clip": 0.3, "shard": "params"},
    "ignore": {"on_nonfinite": "ignore"},
}


def whole(params):
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in params.items()}


def grid(rank, size, pipes, schedule, option):
    """Training over pipelines side by side, beside training of the whole batch in this process."""
    mesh = init_device_mesh("cpu", (pipes, size // pipes), mesh_dim_names=("pp", "dp"))
    data, place, options = size // pipes, mesh.get_local_rank("dp"), OPTIONS[option]
    stages, params, x, y = tied_problem()
    weights = (
        torch.rand(8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        if option == "plain"
        else None
    )
    build, rest = (
        SCHEDULES[schedule],
        {name: value for name, value in options.items() if name != "shard"},
    )
    with new_trainer(
        stages, F.cross_entropy, build(pipes, 8), pp.optim.adamw(1e-2), tied=TIED, **rest
    ) as trainer:
        wanted, found = train(trainer, params, x, y, loss_weights=weights)
        evaluated = trainer.evaluate(wanted, x, y, seed=(0, 0))
    rows, own = ROWS // data, 8 // data
    part = slice(place * rows, (place + 1) * rows)
    here = None if weights is None else weights[place * own : (place + 1) * own]
    build = build(pipes, own)
    with new_trainer(
        stages,
        F.cross_entropy,
        build,
        pp.optim.adamw(1e-2),
        mesh,
        axes=pp.Axes("pp", "dp"),
        tied=TIED,
        **options,
    ) as trainer:
        mine = {s: params[s] for s in build.model_stages_of(mesh.get_local_rank("pp"))}
        state, losses = train(trainer, mine, x[part], y[part], loss_weights=here)
        assert trainer.evaluate(state, x[part], y[part], seed=(0, 0)).item() == pytest.approx(
            evaluated.item(), rel=TOLERANCE
        )
        if option != "plain":
            again, metrics = trainer.steps(trainer.init(mine), [(x[part], y[part])] * STEPS, seed=(0, 0))
            assert same_bits(tree_leaves(again.params), tree_leaves(state.params))
            assert [m.loss.item() for m in metrics] == [loss for loss, _ in losses]
    for got, expected in zip(losses, found, strict=True):
        assert got == pytest.approx(expected, rel=TOLERANCE)
    for s in mine:
        for name, leaf in whole(state.params[s]).items():
            assert torch.allclose(leaf, wanted.params[s][name], rtol=TOLERANCE, atol=TOLERANCE)
    sharded = [t for t in tree_leaves(state.optimizer) if isinstance(t, DTensor)]
    assert bool(sharded) == (option == "params")
    kept = sum(
        t.to_local().numel() if isinstance(t, DTensor) else t.numel() for t in tree_leaves(state.params)
    )
    assert kept * (data if option == "params" else 1) == sum(t.numel() for t in tree_leaves(mine))
    assert all(t.to_local().numel() * data == t.numel() for t in sharded)
    return losses


@pytest.mark.parametrize(
    "schedule, option",
    [("dualpipev", "plain"), ("zbv", "params"), ("interleaved", "ignore")],
)
def test_two_pipelines_of_two_ranks_train_as_one_process(four, schedule, option):
    answers = four(grid, 2, schedule, option)
    assert all(answer == answers[0] for answer in answers)


def overlapping(rank, size, build):
    """Steps of which the next begins on ranks that are done with the one before."""
    mesh, (stages, params, x, y) = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",)), problem()
    batches = [(x + n, y - n) for n in range(STEPS)]
    with new_trainer(
        stages, squared, build(size, 8), pp.optim.adamw(1e-2), mesh, on_nonfinite="ignore"
    ) as trainer:
        got, metrics = trainer.steps(trainer.init({rank: params[rank]}), batches)
        state, found = trainer.init({rank: params[rank]}), []
        for batch in batches:
            state, own = trainer.step(state, *batch)
            found.append(own)
    assert same_bits(got, state)
    assert same_bits(metrics, found)
    assert not torch.equal(state.params[rank]["w"], params[rank]["w"])


@pytest.mark.parametrize("build", [pp.zb_h1, pp.zb_h2])
def test_steps_that_overlap_have_the_bits_of_steps_one_by_one(four, build):
    four(overlapping, build)


def norms_of(transport, ranks=(0, 1)):
    """The norms of steps in which the ranks hold two stages each, of gradients of many magnitudes."""
    stages, params, x, y = problem()
    schedule, scales = pp.zbv(2, 8), (1.0, 1e-3, 7.0, 1e-5)
    mine = {s: {"w": params[s]["w"] * scales[s]} for rank in ranks for s in schedule.model_stages_of(rank)}
    trainer = new_trainer(stages, squared, schedule, pp.optim.sgd(0.1), clip=0.3, transport=transport)
    return train(trainer, mine, x, y)[1]


def norms_in_processes(rank, size):
    with pp.P2P() as transport:
        return norms_of(transport, ranks=[rank])


def test_norms_have_the_same_bits_in_one_process_and_in_two(two):
    """Ranks summed up those of their own stages first: the last bit depended on where stages are."""
    assert two(norms_in_processes) == [norms_of(pp.InProcess())] * 2


def over_groups(rank, size):
    """Pipelines of neighbouring ranks: the norm is that over the group of a replica, parameters are those of
    the group of data.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    stages, params, x, y = problem(2)
    pipe, data = mesh.get_local_rank("pipe"), mesh.get_local_rank("data")
    part = slice(data * ROWS // 2, (data + 1) * ROWS // 2)
    with new_trainer(
        stages, squared, pp.one_f_one_b(2, 4), pp.optim.sgd(1.0), mesh, axes=pp.Axes("pipe", "data")
    ) as trainer:
        state, metrics = trainer.step(trainer.init({pipe: params[pipe]}), x[part], y[part])
    own = state.params[pipe]["w"]
    squares, others = (params[pipe]["w"] - own).square().sum(), [torch.empty_like(own) for _ in range(2)]
    dist.all_reduce(squares, group=mesh.get_group("pipe"))
    dist.all_gather(others, own, group=mesh.get_group("data"))
    assert metrics.grad_norm.item() == pytest.approx(squares.sqrt().item(), rel=TOLERANCE)
    assert all(torch.equal(other, own) for other in others)


def test_the_groups_of_a_mesh_are_those_that_train(four):
    four(over_groups)


def interrupted(rank, size, when):
    """An interrupt takes the result of a step on one rank, after it was committed."""
    stages, params, x, y = problem(2)
    with pp.Trainer(stages, squared, pp.one_f_one_b(2, 4), pp.optim.sgd(0.1), pp.P2P()) as trainer:
        state, _ = trainer.step(trainer.init({rank: params[rank]}), x, y)
        with pytest.MonkeyPatch.context() as patch:
            call = StepFunction.__call__

            def taken(*args, **kwargs):
                call(*args, **kwargs)
                raise KeyboardInterrupt

            if rank and when == "early":  # before the trainer has it
                patch.setattr(StepFunction, "__call__", taken)
                with pytest.raises(KeyboardInterrupt):
                    trainer.step(state, x, y)
            else:
                after, _ = trainer.step(state, x, y)
                state = state if rank else after
        for _ in range(2):
            with pytest.raises(pp.AgreementError, match="rank [01] has (another state|state of step 1)"):
                trainer.step(state, x, y)
        again = trainer.init({rank: params[rank]})
        for _ in range(2):  # from a checkpoint, on all ranks
            again, metrics = trainer.step(again, x, y)
    return metrics.loss.item()


@pytest.mark.parametrize("when", ["early", "late"])
def test_stages_of_different_steps_are_not_mixed(two, when):
    """The stage of one rank went on from a step before that of the other, without an error."""
    one, other = two(interrupted, when)
    assert one == other
