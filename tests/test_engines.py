"""Every engine under every schedule: the same random numbers and the same gradients."""

from __future__ import annotations

from functools import cache

import optree
import pytest
import torch

import ppfunc as pp
from ppfunc.schedule import Op, insert_offloads, insert_recomputes, remove_tail, split_backward
from tests.builders import BUILDERS
from tests.models import dropout_stage, same_bits, squared

D = 6
SEED = (3, 1)
TRAINING = [name for name, builder in BUILDERS.items() if not builder(2, 4).forward_only]
EXACT = {
    "remat": pp.engines.graph(remat="full"),
    "remat of some": pp.engines.graph(remat=lambda operator, _: "gelu" in str(operator)),
    "functional": pp.engines.functional,
    "eager": pp.engines.eager,
}
COMPILED = pp.engines.graph(compile=True)  # one, so that a program is compiled once for all schedules
every = pytest.mark.parametrize("name", TRAINING)


def run(schedule, engine, seed=SEED):
    schedule = remove_tail(schedule)  # that of data parallel ranks, and an optimizer's
    generator = torch.Generator().manual_seed(0)
    stages = len(schedule.flows[0].stages)
    params = {s: {"w": torch.randn(D, D, generator=generator, dtype=torch.float64)} for s in range(stages)}
    inputs, targets = (
        torch.randn(schedule.microbatches * 3, D, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return pp.value_and_grad([dropout_stage] * stages, squared, schedule, engine=engine)(
        params, inputs, targets, seed=seed
    )


KINDS = ("zb_h1", "dualpipev")  # of the programs that schedules ask for


@cache
def wanted(name):
    return run(BUILDERS[name](2, 4), pp.engines.graph)


@pytest.mark.parametrize(
    "name, engine",
    [(name, engine) for engine in EXACT for name in (KINDS if "remat" in engine else TRAINING)],
)
def test_engines_draw_the_same_numbers_and_agree(name, engine):
    results = run(BUILDERS[name](2, 4), EXACT[engine])
    if "remat" in engine:
        assert same_bits(results, wanted(name))
    for mine, other in zip(optree.tree_leaves(results), optree.tree_leaves(wanted(name)), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("engine", EXACT)
def test_another_step_draws_other_numbers(engine):
    assert run(pp.gpipe(2, 4), EXACT[engine], (3, 2))[0] != wanted("gpipe")[0]


@every
def test_offload_and_split_backwards_change_nothing(name):
    schedule = BUILDERS[name](2, 4)
    assert same_bits(run(insert_offloads(schedule), pp.engines.graph), wanted(name))
    assert same_bits(run(split_backward(schedule), pp.engines.graph), wanted(name))


@every
def test_residuals_that_are_computed_again_have_the_same_bits(name):
    schedule = insert_recomputes(BUILDERS[name](2, 4))
    assert Op.RECOMPUTE in schedule.ops
    assert same_bits(run(schedule, pp.engines.graph), wanted(name))


@pytest.mark.parametrize("engine", EXACT)
def test_every_engine_computes_again(engine):
    schedule = pp.zbv(2, 4)
    again = run(insert_recomputes(schedule, stages=[0, 3]), EXACT[engine])
    assert same_bits(again, run(schedule, EXACT[engine]))


class Counting(torch.nn.Linear):
    """A layer whose output depends on how often it has run."""

    def __init__(self):
        super().__init__(D, D, dtype=torch.float64)
        self.register_buffer("count", torch.zeros(D, dtype=torch.float64))

    def forward(self, x):
        y = torch.tanh(super().forward(x) * (1 + self.count))
        self.count.add_(1)
        return y


def test_a_forward_runs_again_from_the_state_that_it_had():
    """A RECOMPUTE reads the state that its forward has read, and gives none."""
    schedule = split_backward(pp.gpipe(2, 4))
    parts = pp.split(torch.nn.Sequential(Counting(), Counting()), torch.zeros(4, D).double(), at=["1"])
    rows = torch.randn(16, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain, again = (
        pp.value_and_grad(parts, squared, s, has_aux=True)(
            parts.params, rows, rows.flip(0), state=parts.state
        )
        for s in (schedule, insert_recomputes(schedule))
    )
    assert same_bits(plain, again)


@pytest.mark.compiler
@pytest.mark.parametrize(
    "name", ["dualpipev", *(pytest.param(n, marks=pytest.mark.large) for n in TRAINING if n != "dualpipev")]
)
def test_compiled_programs_agree(name):
    """DualPipeV asks for every kind of program."""
    schedule = BUILDERS[name](2, 4)
    compiled = run(schedule, COMPILED)
    for mine, other in zip(optree.tree_leaves(compiled), optree.tree_leaves(wanted(name)), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
