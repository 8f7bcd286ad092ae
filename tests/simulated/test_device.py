"""The simulated accelerator: what it reports, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch


def reported(gpu):
    races, gpu.races[:] = list(gpu.races), []
    return races


def test_a_missing_wait_is_reported_with_both_places(gpu):
    a, beside = torch.ones(4, 4, device="cuda"), torch.cuda.Stream()
    b = a @ a
    with torch.cuda.stream(beside):
        c = b + 1
    torch.cuda.synchronize()
    b.record_stream(beside)
    (race,) = reported(gpu)
    assert "reads [4x4]" in race
    assert race.count("in test_a_missing_wait_is_reported_with_both_places") == 2
    assert c.device == torch.device("cuda", 0)


@pytest.mark.parametrize("wait", ["wait_stream", "wait_event", "Event.wait", "synchronize", "host"])
def test_each_kind_of_wait_orders(gpu, wait):
    a, beside, here = torch.ones(4, 4, device="cuda"), torch.Stream("cuda"), torch.cuda.current_stream()
    b = a @ a
    event = torch.Event("cuda")
    event.record()
    if wait == "wait_stream":
        beside.wait_stream(here)
    elif wait == "wait_event":
        beside.wait_event(event)
    elif wait == "Event.wait":
        event.wait(beside)
    elif wait == "synchronize":
        event.synchronize()
    else:
        b.sum().item()
    b.record_stream(beside)
    with beside:
        c = b + 1
    c.record_stream(here)
    here.wait_stream(beside)
    assert c.cpu().eq(5).all()
