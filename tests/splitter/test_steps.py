"""A split in the place of the stages: its skips and tied parameters come with it, in one process and in
several.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import ppfunc as pp
from ppfunc.stage import StageError
from tests.splitter.modules import EncoderDecoder

V, D, T, M = 11, 8, 5, 4


class Tied(nn.Module):
    """An embedding that is also the head, blocks that drop, and a skip from the first stage to the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(D, 2, 2 * D, dropout=0.2, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.wte.weight
        self.double()

    def forward(self, ids):
        first = x = self.wte(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x + first)


def loss_fn(y, target):
    return nn.functional.cross_entropy(y.flatten(0, 1), target.flatten())


def problem(m=M):
    generator = torch.Generator().manual_seed(1)
    ids, targets = (torch.randint(V, (2 * m, T), generator=generator) for _ in range(2))
    model = Tied().eval()
    return model, pp.split(model, ids[:2], at=[f"blocks.{i}" for i in (1, 2, 3)]), ids, targets


shared_problem = cache(problem)
"""For tests that leave the model as it is: they share what is traced of its stages."""


def whole(model, ids, targets):
    loss = loss_fn(model(ids), targets)
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def worst(grads, wanted):
    return max((g - wanted[name]).abs().max().item() for tree in grads.values() for name, g in tree.items())


SCHEDULES = {
    "1f1b": lambda: pp.one_f_one_b(4, M),
    "zbv": lambda: pp.zbv(2, M),
    "dualpipe": lambda: pp.dualpipe(4, 8),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_those_of_the_whole_model(name):
    schedule = SCHEDULES[name]()
    model, parts, ids, targets = shared_problem(schedule.microbatches)
    assert parts.tied and parts.skips
    loss, grads = pp.value_and_grad(parts, loss_fn, schedule)(parts.params, ids, targets)
    want, wanted = whole(model, ids, targets)
    torch.testing.assert_close(loss, want)
    assert worst(grads, wanted) < 1e-14
    assert torch.equal(grads[0]["wte.weight"], grads[3]["wte.weight"])
    shorter = ids[:, :3].contiguous()
    again, grads = pp.value_and_grad(parts, loss_fn, schedule)(parts.params, shorter, targets[:, :3])
    want, wanted = whole(model, shorter, targets[:, :3])
    torch.testing.assert_close(again, want)
    assert worst(grads, wanted) < 1e-14


def test_the_mode_of_the_model_is_followed_by_step_functions_that_are_there_already():
    model, parts, ids, targets = problem()
    step = pp.value_and_grad(parts, loss_fn, pp.one_f_one_b(4, M))
    judged, _ = step(parts.params, ids, targets)
    model.train()
    with pytest.raises(ValueError, match="draws random numbers"):
        step(parts.params, ids, targets)
    one, _ = step(parts.params, ids, targets, seed=(0, 1))
    other, _ = step(parts.params, ids, targets, seed=(0, 2))
    assert len({one.item(), other.item(), judged.item()}) == 3
    assert torch.equal(step(parts.params, ids, targets, seed=(0, 1))[0], one)
    fresh = pp.value_and_grad(parts, loss_fn, pp.gpipe(4, M))
    assert torch.equal(fresh(parts.params, ids, targets, seed=(0, 1))[0], one)
    model.eval()
    assert torch.equal(step(parts.params, ids, targets)[0], judged)


@pytest.mark.xfail(torch.__version__ < "2.12", reason="views tangents as their primals lie, and raises")
def test_evaluation_and_second_derivatives():
    model, parts, ids, targets = shared_problem(M)
    outputs = pp.evaluate(parts, None, pp.gpipe(4, M), return_outputs=True)(parts.params, ids)
    torch.testing.assert_close(outputs, model(ids).detach())
    direction = {
        s: {name: torch.ones_like(p) for name, p in tree.items()} for s, tree in parts.params.items()
    }
    result = pp.hvp(parts, loss_fn, pp.one_f_one_b(4, M))(parts.params, direction, ids, targets)
    loss, slope, grads = result.loss, result.slope, result.grads
    want, wanted = whole(model, ids, targets)
    torch.testing.assert_close(loss, want)
    assert worst(grads, wanted) < 1e-12
    torch.testing.assert_close(slope, sum(g.sum() for g in wanted.values()))
    assert torch.equal(pp.jvp(parts, loss_fn, pp.gpipe(4, M))(parts.params, direction, ids, targets)[0], loss)


def in_processes(rank, ranks, name):
    schedule = SCHEDULES[name]()
    model, parts, ids, targets = shared_problem(schedule.microbatches)
    want, wanted = whole(model, ids, targets)
    held = {s: parts.params[s] for s in schedule.model_stages_of(rank)}
    with pp.P2P(timeout=60) as transport:
        loss, grads = pp.value_and_grad(parts, loss_fn, schedule, transport)(held, ids, targets)
    torch.testing.assert_close(loss, want)
    assert worst(grads, wanted) < 1e-14


@pytest.mark.parametrize(("pool", "name"), [("two", "zbv"), ("four", "1f1b"), ("four", "dualpipe")])
def test_in_processes(request, pool, name):
    request.getfixturevalue(pool)(in_processes, name)


def test_another_number_of_stages_is_refused():
    _, parts, _, _ = shared_problem(M)
    with pytest.raises(ValueError, match="stages: got 4, the schedule 'gpipe' has 3"):
        pp.value_and_grad(parts, loss_fn, pp.gpipe(3, M))


def test_a_tie_of_the_split_is_not_replaced():
    _, parts, _, _ = shared_problem(M)
    with pytest.raises(ValueError, match="tied: got 'wte.weight', which the split has tied"):
        pp.value_and_grad(
            parts, loss_fn, pp.one_f_one_b(4, M), tied={"wte.weight": [(0, "wte.weight"), (3, "wte.weight")]}
        )


def of_the_output(y, target):
    return (y.square().mean() * target).sum()


@cache
def samples_one_by_one(count=16):
    """Return a split model, samples, and the loss and gradients of each alone, by parameter name."""
    torch.manual_seed(0)
    model = EncoderDecoder().double().eval()
    ids, decoder_ids = torch.randint(11, (count, 5)), torch.randint(11, (count, 4))
    batch, targets = (
        {"ids": ids, "decoder_ids": decoder_ids, "mask": (ids > 2).long()},
        torch.randn(count).double(),
    )
    parts = pp.split(
        model, kwargs={key: t[:2] for key, t in batch.items()}, at=["encoder.1", "decoder.0", "decoder.1"]
    )
    params = {key: p.detach() for key, p in model.named_parameters()}

    def of_one(params, i):
        given = {key: t[i : i + 1] for key, t in batch.items()}
        return of_the_output(torch.func.functional_call(model, params, (), given), targets[i : i + 1])

    grads, losses = zip(*(torch.func.grad_and_value(of_one)(params, i) for i in range(count)), strict=True)
    return (
        parts,
        batch,
        targets,
        torch.stack(losses),
        {key: torch.stack([each[key] for each in grads]) for key in params},
    )


@pytest.mark.parametrize("name", ["zbv", "dualpipe"])
def test_gradients_of_every_sample(name):
    """Of a model whose mask depends on a parameter, that writes into tensors, and whose stages pass on values
    without a batch axis.
    """
    schedule, b = SCHEDULES[name](), 2
    parts, batch, targets, losses, wanted = samples_one_by_one()
    n = schedule.microbatches * b
    step = pp.per_sample_grad(parts, of_the_output, schedule, samples=b)
    value, grads = step(parts.params, {key: t[:n] for key, t in batch.items()}, targets[:n])
    torch.testing.assert_close(value, losses[:n].mean())
    for key, grad in (item for tree in grads.values() for item in tree.items()):
        torch.testing.assert_close(grad.flatten(0, 1), wanted[key][:n], rtol=1e-12, atol=1e-12)


def test_gradients_of_every_sample_of_models_with_dropout_or_a_state():
    model, parts, ids, targets = problem()
    model.train()
    with pytest.raises(StageError, match='pass randomness="different" or "same"'):
        pp.per_sample_grad(parts, loss_fn, pp.one_f_one_b(4, M), samples=2)(
            parts.params, ids, targets, seed=(0, 0)
        )
    step = pp.per_sample_grad(parts, loss_fn, pp.one_f_one_b(4, M), samples=2, randomness="different")
    one, other = (
        step(parts.params, torch.cat([ids[:1]] * 2 * M), torch.cat([targets[:1]] * 2 * M), seed=(0, n))[1]
        for n in range(2)
    )
    assert not torch.equal(one[1]["blocks.1.linear1.weight"], other[1]["blocks.1.linear1.weight"])
    assert not torch.equal(*one[1]["blocks.1.linear1.weight"][0])
    normed = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, D))
    with pytest.raises(
        ValueError, match=r"stages: got a split that writes into the buffer 1\..*split in evaluation"
    ):
        pp.per_sample_grad(pp.split(normed, torch.zeros(2, D), at=["1"]), loss_fn, pp.gpipe(2, 1), samples=2)
