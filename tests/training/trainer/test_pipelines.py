"""Pipelines in processes train as one process: random numbers, weights of losses, evaluation, steps that
overlap, groups of a mesh.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import ppfunc as pp
from ppfunc.runtime.step import StepFunction
from tests.models import new_trainer, same_bits, squared
from tests.sharded_models import full
from tests.training.trainer.problems import STEPS, TIED, TOLERANCE, problem, tied_problem, train


def side_by_side(rank, size, schedule, shard):
    """Training over two pipelines, which draw numbers and weigh losses, beside that of the whole batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place, (stages, params, x, y) = mesh.get_local_rank("dp"), tied_problem()
    weights = torch.rand(8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    options, build = {"tied": TIED, "clip": 0.3}, getattr(pp, schedule)
    with new_trainer(stages, F.cross_entropy, build(2, 8), pp.optim.adamw(1e-2), **options) as trainer:
        wanted, found = train(trainer, params, x, y, loss_weights=weights)
        evaluated = trainer.evaluate(wanted, x, y, seed=(0, 0))
    options |= {"axes": pp.Axes("pp", "dp"), "shard": shard}
    (x, y), weights = (t.chunk(2)[place] for t in (x, y)), weights.chunk(2)[place]
    with new_trainer(stages, F.cross_entropy, build(2, 4), pp.optim.adamw(1e-2), mesh, **options) as trainer:
        mine = {s: params[s] for s in trainer.schedule.model_stages_of(mesh.get_local_rank("pp"))}
        state, losses = train(trainer, mine, x, y, loss_weights=weights)
        loss = trainer.evaluate(state, x, y, seed=(0, 0))
    torch.testing.assert_close((loss, losses), (evaluated, found), rtol=TOLERANCE, atol=0)
    for s in mine:
        for name, leaf in full(state.params[s]).items():
            torch.testing.assert_close(leaf, wanted.params[s][name], rtol=TOLERANCE, atol=TOLERANCE)
    return losses


@pytest.mark.parametrize("schedule, shard", [("dualpipev", "none"), ("zbv", "params")])
def test_two_pipelines_of_two_ranks_train_as_one_process(four, schedule, shard):
    answers = four(side_by_side, schedule, shard)
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
