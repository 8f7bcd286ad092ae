"""Graphs of the simulated accelerator: replays, their memory, and what a capture forbids."""

from __future__ import annotations

import pytest
import torch


def captured(run, **options):
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream, **options):
        results = run()
    return graph, results


@pytest.fixture
def x(gpu):
    return torch.ones(4, device="cuda")


def test_a_replay_runs_what_was_captured(gpu, x):
    graph, y = captured(lambda: (x * 2) + 1)
    for value in 1, 5:
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [2 * value + 1] * 4


def test_a_replay_is_ordered_as_one_operation(gpu, x):
    graph, y = captured(lambda: x * 2)
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.replay()
    y + 1
    assert "graph, number" in gpu.races.pop()
    x.fill_(2)
    assert "graph, number" in gpu.races.pop()
    torch.cuda.synchronize()


def test_a_capture_runs_nothing(gpu, x):
    _, y = captured(lambda: x.fill_(3) * 2)
    assert x.tolist() == [1] * 4
    assert y.isnan().all()


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_capture_forbids_waits(gpu, x, mode):
    event = torch.cuda.Event()
    event.record()

    def run():
        if mode == "relaxed":
            return event.synchronize()
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            event.synchronize()
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            x.sum().item()

    captured(run, capture_error_mode=mode)


def test_the_default_stream_is_not_captured(gpu, x):
    with pytest.raises(RuntimeError, match="non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()


def test_each_replay_draws_anew(gpu, x):
    graph, y = captured(lambda: torch.rand(4, device="cuda"))
    torch.manual_seed(1)
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(y.clone())
    assert not torch.equal(*seen)
    torch.manual_seed(1)
    graph.replay()
    assert torch.equal(y, seen[0])


def test_graphs_of_one_pool_share_memory(gpu, x):
    """What the second holds may lie where the first has freed, so that the first spoils it."""
    pool = torch.cuda.graph_pool_handle()
    first, y = captured(lambda: (x * 2) * 3, pool=pool)
    second, z = captured(lambda: x * 5, pool=pool)
    for graph in first, second:
        graph.replay()
    assert y.tolist() == [6] * 4
    assert z.tolist() == [5] * 4
    first.replay()
    assert y.tolist() == [6] * 4
    assert z.isnan().all()
    apart, _ = captured(lambda: (x * 2) * 3)
    second.replay()
    apart.replay()
    assert z.tolist() == [5] * 4


def test_graphs_of_one_pool_must_not_run_at_once(gpu, x):
    pool = torch.cuda.graph_pool_handle()
    first, _ = captured(lambda: (x * 2) * 3, pool=pool)
    second, _ = captured(lambda: x * 5, pool=pool)
    first.replay()
    with torch.cuda.stream(torch.cuda.Stream()):
        second.replay()
    torch.cuda.synchronize()
    assert gpu.races
    gpu.races.clear()


def test_torch_accelerator_has_graphs_too(gpu, x):
    if not hasattr(torch.accelerator, "Graph"):
        pytest.skip("torch 2.13 has them first")
    graph = torch.accelerator.Graph()
    with torch.Stream("cuda"), graph:
        y = x + 1
    graph.replay()
    assert y.tolist() == [2] * 4
