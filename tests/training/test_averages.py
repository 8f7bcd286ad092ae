"""Averages of parameters over updates, in process and sharded."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import ppfunc as pp
from tests.models import dense, new_trainer, normal, same_bits, squared
from tests.sharded_models import full


def params(dtype=torch.float64):
    return {"w": normal(4, 3).to(dtype), "n": torch.arange(2)}


def followed(optimizer, tree, steps, skipped=()):
    """The parameters and states after each update; gradients are the parameters."""
    state, found = optimizer.init(tree), []
    for n in range(steps):
        tree, state = optimizer.update(tree, state, tree, found_inf=torch.tensor(float(n in skipped)))
        found.append((tree, state))
    return found


def test_the_average_is_that_of_torch():
    model, averaging = nn.Linear(3, 4), torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    averages = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=averaging)
    averages.update_parameters(model)
    tree = {name: p.detach().clone() for name, p in model.named_parameters()}
    for new, state in followed(pp.optim.ema(pp.optim.sgd(0.1), 0.9), tree, 4):
        model.load_state_dict(new)
        averages.update_parameters(model)
        for name, p in averages.module.named_parameters():
            torch.testing.assert_close(state["average"][name], p.detach(), rtol=1e-6, atol=1e-7)


def test_a_skipped_update_changes_no_average():
    optimizer = pp.optim.ema(pp.optim.adamw(0.1))
    before, skipped = followed(optimizer, params(), 4, skipped=(3,))[-2:]
    assert same_bits(before, skipped)


def test_averages_of_halves_are_kept_in_float32():
    optimizer = pp.optim.ema(pp.optim.sgd(0.01), 0.999)
    new, state = followed(optimizer, params(torch.bfloat16), 3)[-1]
    assert state["average"]["w"].dtype == torch.float32 and new["w"].dtype == torch.bfloat16
    assert not torch.equal(state["average"]["w"], params(torch.bfloat16)["w"].float())


def test_parameters_of_modules_leave_no_graph():
    weight = [nn.Parameter(normal(3))]
    optimizer = pp.optim.ema(pp.optim.sgd(0.1))
    new, state = optimizer.update([normal(3)], optimizer.init(weight), weight)
    assert not new[0].requires_grad and not state["average"][0].requires_grad


def test_an_optimizer_that_clips_is_clipped_around_all():
    clipped = pp.optim.chain(pp.optim.clip_by_global_norm(1.0), pp.optim.sgd(0.1))
    with pytest.raises(ValueError, match=r"expected the clip around all, chain\(clip, ema\(\.\.\.\)\)"):
        pp.optim.ema(clipped)
    with pytest.raises(ValueError, match="decay is 1.0, expected a number of at least 0 and less than 1"):
        pp.optim.ema(pp.optim.sgd(0.1), 1.0)


def sharded(rank, size, shard):
    """Train with averages; return parameters and averages, whole, and the loss of these."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    optimizer = pp.optim.chain(pp.optim.clip_by_global_norm(1.0), pp.optim.ema(pp.optim.adamw(0.1), 0.8))
    x, y = normal(4, 6), normal(4, 6, seed=9)
    options = {"axes": pp.Axes("pp", "dp"), "shard": shard}
    with new_trainer([dense], squared, pp.gpipe(1, 2), optimizer, mesh, **options) as trainer:
        state = trainer.init({0: {"w": normal(6, 6)}})
        for n in range(5):
            state, _ = trainer.step(state, normal(4, 6, seed=n), y)
        average = state.optimizer[0]["average"]
        assert isinstance(average["w"], DTensor) == (shard != "none")
        if shard == "optimizer":
            told = r"state.params\[0\]: got parts over the axis 'dp', expected whole parameters"
            with pytest.raises((ValueError, pp.PipelineError), match=told):
                trainer.evaluate(state._replace(params={0: average}), x, y)
            average = full(average)
        loss = trainer.evaluate(state._replace(params={0: average}), x, y)
    return full(state.params[0])["w"], full(average)["w"], loss


def test_sharded_averages_are_those_of_the_whole(two):
    expected = two(sharded, "none")
    for shard in ("optimizer", "params"):
        torch.testing.assert_close(two(sharded, shard), expected, rtol=1e-12, atol=1e-14)
