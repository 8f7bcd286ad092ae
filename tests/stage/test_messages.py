"""Messages in a smaller dtype: fewer bytes, and the bits of stages that cast by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ppfunc as pp
from ppfunc.schedule import Op
from tests.models import normal, same_bits, squared

D, M = 8, 4
SEEN = torch.bfloat16


class Skipping(nn.Module):
    """Layers, the last of which takes the input of the model and the number of its columns."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x):
        count = (x > 0).sum(-1)
        first = self.a(x).tanh()
        return self.c(self.b(first).tanh()) * first + count[:, None]


class ByHand(Skipping):
    """The same with casts, each of which rounds an activation, and its gradient, once for each reader."""

    def forward(self, x):
        count = (x > 0).sum(-1)
        first = self.a(x).tanh()
        second = self.b(first.to(SEEN).to(first.dtype)).tanh().to(SEEN).to(first.dtype)
        return self.c(second) * first.to(SEEN).to(first.dtype) + count[:, None]


def problem(cls):
    torch.manual_seed(0)
    model = cls()
    return pp.split(model, normal(2, D, dtype=torch.float32), at=["b", "c"])


def batch():
    return normal(2 * M, D, dtype=torch.float32), normal(2 * M, D, seed=1, dtype=torch.float32)


def sizes(step, params):
    """Bytes of the messages by instruction, of all that is sent."""
    lowered = step.lower(params, *batch()).step
    edges = {
        str(i): lowered.edge_of(i).travelling(i.op is Op.SEND_F)
        for rank in lowered.ranks
        for i in lowered.schedule.instructions(rank)
        if i.op in (Op.SEND_F, Op.SEND_B)
    }
    return {
        name: {leaf.dtype: leaf.nbytes for leaf in leaves if leaf.nbytes} for name, leaves in edges.items()
    }


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_messages_are_cast_and_nothing_else(name):
    schedule = pp.schedule.BUILDERS[name](3, M)
    plain, by_hand = problem(Skipping), problem(ByHand)
    cast = pp.cast_messages(plain, SEEN)
    steps = [pp.value_and_grad(split, squared, schedule) for split in (plain, cast, by_hand)]
    results = [step(plain.params, *batch()) for step in steps]
    assert same_bits(results[1], results[2])
    assert not same_bits(results[0], results[1])
    before, after = (sizes(step, plain.params) for step in steps[:2])
    assert before.keys() == after.keys()
    for message, by_dtype in before.items():
        float_bytes = by_dtype.pop(torch.float32)
        assert after[message] == {SEEN: float_bytes // 2, **by_dtype}, message


def test_one_edge_is_cast():
    plain = problem(Skipping)
    cast = pp.cast_messages(plain, SEEN, after=[1])
    sent = sizes(pp.value_and_grad(cast, squared, pp.one_f_one_b(3, M)), plain.params)
    assert {text[0] for text, by_dtype in sent.items() if SEEN in by_dtype} == {"1", "2"}
    with pytest.raises(ValueError, match=r"after: got \[2\], expected some of the stages 0 to 1"):
        pp.cast_messages(plain, SEEN, after=[2])
    with pytest.raises(TypeError, match=r"dtype: got torch\.int32 of type dtype, expected a floating dtype"):
        pp.cast_messages(plain, torch.int32)


def on_ranks(rank, size, alike):
    """The results of a rank whose messages are cast; where ranks differ, those of rank 0 alone."""
    plain = problem(Skipping)
    split = pp.cast_messages(plain, SEEN) if alike or rank == 0 else plain
    x, target = batch()
    mine = {rank: plain.params[rank]}
    with pp.P2P() as transport:
        step = pp.value_and_grad(split, squared, pp.one_f_one_b(3, M), transport)
        try:
            return step(mine, x if rank == 0 else None, target if rank == 2 else None)
        except Exception as error:
            return str(error)


def test_processes_send_the_same_bits(three):
    plain = problem(Skipping)
    whole = pp.value_and_grad(pp.cast_messages(plain, SEEN), squared, pp.one_f_one_b(3, M))
    loss, grads = whole(plain.params, *batch())
    for rank, (one, own) in enumerate(three(on_ranks, True)):
        assert same_bits((loss, grads[rank]), (one, own[rank]))
    assert all("stage 1" in text for text in three(on_ranks, False))
