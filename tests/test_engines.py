"""Every engine under every schedule: the same random numbers and the same gradients."""

from __future__ import annotations

import optree
import pytest
import torch
import torch.nn.functional as F

import ppfunc as pp
from ppfunc.schedule import BUILDERS, insert_offloads, remove_tail, split_backward
from tests.models import same_bits, squared

D = 6
SEED = (3, 1)
TRAINING = [name for name, builder in BUILDERS.items() if not builder(2, 4).forward_only]
EXACT = {
    "remat": pp.engines.graph(remat="full"),
    "remat of some": pp.engines.graph(remat=lambda operator: "gelu" in str(operator)),
    "remat to a budget": pp.engines.graph(remat=500),
    "functional": pp.engines.functional,
    "eager": pp.engines.eager,
}
COMPILED = pp.engines.graph(compile=True)  # one, so that a program is compiled once for all schedules
every = pytest.mark.parametrize("name", TRAINING)


def stage(params, x):
    return F.dropout(F.gelu(x @ params["w"]), 0.25) + x


def run(schedule, engine, seed=SEED):
    schedule = remove_tail(schedule)  # that of data parallel ranks, and an optimizer's
    generator = torch.Generator().manual_seed(0)
    stages = len(schedule.chains[0].stages)
    params = {s: {"w": torch.randn(D, D, generator=generator, dtype=torch.float64)} for s in range(stages)}
    inputs, targets = (
        torch.randn(schedule.microbatches * 3, D, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return pp.value_and_grad([stage] * stages, squared, schedule, engine=engine)(
        params, inputs, targets, seed=seed
    )


@every
@pytest.mark.parametrize("engine", EXACT)
def test_engines_draw_the_same_numbers_and_agree(name, engine):
    schedule = BUILDERS[name](2, 4)
    (loss, grads), (want, wanted) = run(schedule, EXACT[engine]), run(schedule, pp.engines.graph)
    if "remat" in engine:
        assert same_bits((loss, grads), (want, wanted))
    for mine, other in zip(
        optree.tree_leaves((loss, grads)), optree.tree_leaves((want, wanted)), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)
    assert run(schedule, EXACT[engine], (3, 2))[0] != loss


@every
def test_offload_and_split_backwards_change_nothing(name):
    schedule = BUILDERS[name](2, 4)
    wanted = run(schedule, pp.engines.graph)
    assert same_bits(run(insert_offloads(schedule), pp.engines.graph), wanted)
    assert same_bits(run(split_backward(schedule), pp.engines.graph), wanted)


KINDS = ("gpipe", "zb_h1", "dualpipev", "data_parallel")  # of the programs that schedules ask for


@pytest.mark.compiler
@pytest.mark.parametrize(
    "name", [name if name in KINDS else pytest.param(name, marks=pytest.mark.large) for name in TRAINING]
)
def test_compiled_programs_agree(name):
    schedule = BUILDERS[name](2, 4)
    compiled, plain = run(schedule, COMPILED), run(schedule, pp.engines.graph)
    for mine, other in zip(optree.tree_leaves(compiled), optree.tree_leaves(plain), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
