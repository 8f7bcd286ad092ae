"""The simulated accelerator: what it reports, what it leaves alone, and where the host waits."""

from __future__ import annotations

import threading
import time

import pytest
import torch

LATE = {"lag": 1000, "idle": 1000}  # nothing runs before the host waits


def reported(gpu):
    """Take the races that were found."""
    races, gpu.races[:] = list(gpu.races), []
    return races


def ones(*shape):
    return torch.ones(*shape, device="cuda")


def test_a_missing_wait_is_reported_with_both_places(gpu):
    b, beside = ones(4, 4) @ ones(4, 4), torch.cuda.Stream()
    with torch.cuda.stream(beside):
        b + 1
    torch.cuda.synchronize()
    (race,) = reported(gpu)
    assert "reads [4x4]" in race
    assert race.count("in test_a_missing_wait_is_reported_with_both_places") == 2


@pytest.mark.parametrize("wait", ["wait_stream", "wait_event", "Event.wait", "synchronize", "query", "item"])
def test_each_kind_of_wait_orders(gpu, wait):
    beside, here, event = torch.Stream("cuda"), torch.cuda.current_stream(), torch.Event("cuda")
    b = ones(4, 4) @ ones(4, 4)
    event.record()
    match wait:
        case "wait_stream":
            beside.wait_stream(here)
        case "wait_event":
            beside.wait_event(event)
        case "Event.wait":
            event.wait(beside)
        case "synchronize":
            event.synchronize()
        case "query":
            while not event.query():
                pass
        case "item":
            b.sum().item()
    with beside:
        c = b + 1
    here.wait_stream(beside)
    assert c.cpu().eq(5).all()


def test_a_wait_reaches_what_was_recorded_before_it_only(gpu):
    b, beside, event = torch.zeros(4, device="cuda"), torch.Stream("cuda"), torch.Event("cuda")
    event.record()
    b += 1
    beside.wait_event(event)
    with beside:
        b * 2
    torch.cuda.synchronize()
    assert len(reported(gpu)) == 1


def test_parts_of_a_block_are_told_apart(gpu):
    """By bytes, with the gaps of strides: columns of one matrix on two streams."""
    a, beside = torch.zeros(4, 4, device="cuda"), torch.Stream("cuda")
    torch.cuda.synchronize()
    a[:, :2] += 1
    with beside:
        a[:, 2:] += 1
    assert not gpu.races
    with beside:
        a[1:2] += 1
    assert reported(gpu)
    torch.cuda.synchronize()
    del a


def test_memory_begins_as_nan_and_is_written_late(simulate):
    simulate(**LATE)
    assert torch.empty(3, device="cuda").isnan().all().item()
    pinned = torch.zeros(3).pin_memory()
    pinned.copy_(ones(3), non_blocking=True)
    assert ones(2).to("cpu", non_blocking=True).is_pinned()
    early = pinned.clone()
    torch.cuda.synchronize()
    assert early.isnan().all()
    assert pinned.eq(1).all()


def test_a_pinned_source_is_read_late(simulate):
    gpu = simulate(**LATE)
    source = torch.ones(3).pin_memory()
    there = source.to("cuda", non_blocking=True)
    source.fill_(2)
    assert there.tolist() == [2, 2, 2]
    assert not any(kind == "copy from the host" for kind, _ in gpu.waits)


def test_an_event_tells_its_time_once_the_host_knows_that_it_is_done(gpu):
    first, second = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    first.record(), second.record()
    time.sleep(0.1)  # the device has done both, and the host has not waited for it
    with pytest.raises(RuntimeError, match="must be completed"):
        first.elapsed_time(second)
    second.synchronize()
    assert first.elapsed_time(second) > 0


@pytest.mark.parametrize("waits", [True, False])
def test_pinned_memory_is_fetched_after_it_was_written(gpu, waits):
    out, back, a = torch.Stream("cuda"), torch.Stream("cuda"), ones(4)
    torch.cuda.synchronize()
    with out:
        pinned = a.to("cpu", non_blocking=True)
    if waits:
        back.wait_stream(out)
    with back:
        pinned.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert ["reads [4] of pinned memory" in race for race in reported(gpu)] == [True] * (not waits)


def freed_while_used(gpu, record):
    """Use memory on a stream, free it, and let its own stream hand it out; returns what the use has read."""
    here, beside = torch.cuda.current_stream(), torch.Stream("cuda")
    for _ in range(20):
        b = ones(64)
        beside.wait_stream(here)
        with beside:
            c = b * 1
        if record:
            b.record_stream(beside)
        del b
        torch.empty(64, device="cuda")
        here.wait_stream(beside)
        c.record_stream(here)
        seen = c.sum().item()
        if seen != 64:
            break
    return seen


def test_memory_that_is_freed_while_used_is_reported_and_poisoned(simulate):
    gpu = simulate(idle=1000)
    seen = freed_while_used(gpu, record=False)
    races = reported(gpu)
    assert races
    assert "record_stream is missing" in races[0]
    assert seen != seen


def test_recorded_memory_is_kept(gpu):
    assert freed_while_used(gpu, record=True) == 64


@pytest.mark.parametrize("who", ["stream", "host"])
def test_what_waits_for_the_other_stream_may_free(gpu, who):
    """Without ``record_stream``: the stream of the memory follows the use before it hands it out."""
    here, beside = torch.cuda.current_stream(), torch.Stream("cuda")
    b = ones(64)
    beside.wait_stream(here)
    with beside:
        (b * 1).sum()
    if who == "stream":
        here.wait_stream(beside)
    else:
        beside.synchronize()
    del b
    torch.empty(64, device="cuda")


def test_operators_on_two_devices_raise(gpu):
    for other in torch.ones(2), torch.ones(2, device="cuda:1"):
        for operator in torch.add, torch.dot:
            with pytest.raises(RuntimeError, match="at least two devices"):
                operator(ones(2), other)
    assert (ones(2) + torch.tensor(2.0)).tolist() == [3, 3]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ones(2, 3) @ ones(2, 3)


def test_a_thread_has_its_own_device_and_stream(gpu):
    seen = []

    def look():
        seen.append((torch.cuda.current_device(), torch.cuda.current_stream().stream_id))

    torch.cuda.set_device(1)
    with torch.cuda.stream(torch.cuda.Stream()):
        look()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    torch.cuda.set_device(0)
    assert seen[0][0] == 1
    assert seen[1] == (0, 0)


def test_a_copy_between_devices_orders_both(gpu):
    a = ones(4)
    b = (a * 2).to("cuda:1")
    c = (b + 1).to("cuda:0")
    a += 1
    assert c.tolist() == [3] * 4


def test_a_storage_is_freed_and_allocated_again(gpu):
    before, x = gpu.memory.now(0), torch.ones(64, device="cuda")
    x.untyped_storage().resize_(0)
    assert gpu.memory.now(0) == before
    assert (x.size(), x.untyped_storage().nbytes()) == ((64,), 0)
    x.untyped_storage().resize_(256)
    assert gpu.memory.now(0) == before + 256
    assert x.isnan().all().item()
    assert x.fill_(2).sum().item() == 128
    host = torch.ones(2)
    host.untyped_storage().resize_(16)
    assert host.untyped_storage().nbytes() == 16


def test_host_waits_are_counted_by_kind(gpu):
    a = ones(40000)
    gpu.waits.clear()
    a.sum().item()
    a.cpu()
    torch.ones(2).to("cuda")
    torch.ones(2).to("cuda", non_blocking=True)
    torch.ones(40000).to("cuda", non_blocking=True)
    a.nonzero()
    torch.cuda.current_stream().synchronize()
    torch.cuda.synchronize()
    assert {kind: count for (kind, _), count in gpu.waits.items()} == {
        "item": 1,
        "copy to the host": 1,
        "copy from the host": 1,
        "copy of much pageable memory": 1,
        "nonzero": 1,
        "stream": 1,
        "device": 1,
    }


def test_a_failing_kernel_breaks_the_device(gpu):
    ones(3)[torch.tensor([7], device="cuda")]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="index.*failed.*out of bounds"):
            torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="failed"):
        torch.Stream("cuda").synchronize()


def test_a_hang_names_the_heads_of_the_streams(simulate):
    gpu = simulate(hang=0.3)
    gpu.issue(gpu.current(), "a message that never comes", lambda: None, ready=lambda: False)
    with pytest.raises(TimeoutError, match=r"stream 0 of cuda:0: a message that never comes"):
        torch.cuda.synchronize()


def test_the_interleaving_is_that_of_the_seed(simulate):
    def order(seed):
        gpu, seen = simulate(seed=seed, idle=1000), []
        streams = [gpu.new_stream(0) for _ in range(4)]
        for n in range(20):
            for stream in streams:
                gpu.issue(stream, "note", lambda s=stream.id, n=n: seen.append((s, n)))
        torch.cuda.synchronize()
        return seen

    assert order(1) == order(1) != order(2)


def test_numbers_are_drawn_when_they_are_issued(gpu):
    generator = torch.cuda.default_generators[0]
    torch.manual_seed(3)
    state = generator.get_state()
    first = torch.rand(4, device="cuda"), torch.nn.functional.dropout(ones(32))
    generator.set_state(state)
    again = torch.rand(4, device="cuda"), torch.nn.functional.dropout(ones(32))
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(torch.rand(4, device="cuda"), first[0])
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4, device="cuda"), first[0])
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type"):
        torch.empty(3, device="cuda").normal_(generator=torch.Generator())


def test_the_names_are_put_back(installed):
    assert not torch.cuda.is_available()
    assert torch.cuda.Stream.__module__ == "torch.cuda.streams"
