"""What another schedule of the same placement would gain."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ppfunc as pp
from tests.models import squared

D = 16


def slowed(params, x):
    return torch.tanh(x @ params["w"])


def test_another_schedule_gains_what_is_promised_where_a_stage_is_slow():
    """Stage 2 takes half as long again: the plan for it is run on paper with the costs that were measured."""
    stages, x = [slowed] * 4, torch.randn(16, D)
    params = {s: {"w": torch.randn(D, D)} for s in range(4)}
    trainer = pp.Trainer(stages, squared, pp.one_f_one_b(4, 8), pp.optim.sgd(0.1))
    state = trainer.init(params)
    (state, _), timeline = trainer.record(state, x, x)
    costs = pp.Costs([1, 1, 1.5, 1], [1, 1, 1.5, 1], [1, 1, 1.5, 1])
    timeline = replace(pp.simulate(timeline.schedule, costs), measured=True)
    again = pp.replan(trainer, timeline, effort=0.1)
    assert 0 < again.gain < 1 and again.now == pp.simulate(pp.one_f_one_b(4, 8), costs).makespan
    assert max(again.plan.timeline.peak_activations) <= 4
    after = trainer.with_schedule(again.plan.schedule)
    assert pp.simulate(pp.schedule.compute_only(after.schedule), costs).makespan == again.plan.value
    after.step(state, x, x)
    with pytest.raises(ValueError, match="timeline: got a simulated one"):
        pp.replan(trainer, pp.simulate(trainer.schedule))
    recomputing = pp.schedule.insert_recomputes(pp.one_f_one_b(4, 8))
    with pytest.raises(ValueError, match="its schedule has RECOMPUTE, whose times"):
        pp.replan(trainer.with_schedule(recomputing), timeline)
    with pytest.raises(ValueError, match=r"timeline: got a measured one of '1f1b'.*expected that"):
        pp.replan(after, timeline)
