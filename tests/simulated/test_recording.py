"""Timelines of stages on several devices of one process."""

from __future__ import annotations

import time

import pytest
import torch

import ppfunc as pp
from ppfunc.schedule import Op
from tests.clock import busy
from tests.models import dense, problem, squared


@pytest.mark.parametrize("devices", [(0, 0), (0, 1), (1, 0)])
def test_each_device_has_events_of_its_own(gpu, devices):
    """Those of the current device alone say nothing of what another one does."""
    slow, pause = {"on": False}, 0.1 * busy()

    @torch.library.custom_op("simulated::slowly", mutates_args=())
    def slowly(x: torch.Tensor) -> torch.Tensor:
        if slow["on"]:
            time.sleep(pause)
        return x.clone()

    @torch.library.custom_op("simulated::at_once", mutates_args=())
    def at_once(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    slowly.register_fake(torch.empty_like)
    at_once.register_fake(torch.empty_like)
    at_once.register_autograd(lambda ctx, g: slowly(g))

    def slow_backward(params, x):
        return at_once(dense(params, x))

    schedule = pp.gpipe(2, 2)
    params, x, y = problem(schedule)
    held = {s: {"w": params[s]["w"].to(torch.device("cuda", d))} for s, d in enumerate(devices)}
    step = pp.value_and_grad([slow_backward, dense], squared, schedule)
    step(held, x, y)
    slow["on"] = True
    _, timeline = step.record(held, x, y)
    lasts = {}
    for rank in range(2):
        spans = zip(timeline.starts[rank], timeline.ends[rank], strict=True)
        for instruction, (start, end) in zip(timeline.schedule.instructions(rank), spans, strict=True):
            assert end >= start
            lasts.setdefault((instruction.op, instruction.stage), []).append(end - start)
    assert min(lasts[Op.B, 0]) > 0.8 * pause, lasts
    assert max(lasts[Op.F, 0] + lasts[Op.F, 1] + lasts[Op.B, 1]) < 0.8 * pause, lasts
