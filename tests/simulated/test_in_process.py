"""Steps in one process on simulated devices: the bits of the CPU, no race, and what a missing wait does."""

from __future__ import annotations

from functools import cache
from itertools import product

import optree
import pytest
import torch

import ppfunc as pp
from ppfunc.schedule.passes.rewrite import insert_offloads
from tests.models import dropout_stage, same_bits, squared
from tests.simulated.cases import cases

ENGINES = {
    "graph": pp.engines.graph,
    "functional": pp.engines.functional,
    "eager": pp.engines.eager,
}
SCHEDULES = {
    "1f1b": lambda: pp.one_f_one_b(2, 4),
    "zero bubble": lambda: pp.zb_h1(2, 4),
    "dualpipev": lambda: pp.dualpipev(2, 4),
    "offload": lambda: insert_offloads(pp.gpipe(2, 4)),
}
PLACES = {"one device": ["cuda:0"], "two devices": ["cuda:0", "cuda:1"]}
PLAIN = ["1f1b", "zero bubble", "dualpipev"]
FEW = [
    ("graph", "one device", "1f1b"),
    ("graph", "two devices", "zero bubble"),
    ("functional", "two devices", "1f1b"),
    ("eager", "one device", "dualpipev"),
]
D = 4
engines = pytest.mark.parametrize("engine", ENGINES)
places = pytest.mark.parametrize("place", PLACES)


def block(params, x):
    return torch.tanh(x @ params["w"]) + x


def problem(name, devices=("cpu",)):
    """Return a schedule, stages, and arguments, those of a rank on a device."""
    schedule = SCHEDULES[name]()
    generator = torch.Generator().manual_seed(0)
    params = {
        s: {"w": torch.randn(D, D, generator=generator).to(devices[schedule.placement[s] % len(devices)])}
        for s in sorted(set(schedule.model_stages))
    }
    x, y = (torch.randn(2 * schedule.microbatches, D, generator=generator) for _ in range(2))
    stages = [block] * len(schedule.flows[0].stages)
    return schedule, stages, (params, x.to(devices[0]), y.to(devices[-1]))


@cache
def on_the_cpu(name):
    schedule, stages, arguments = problem(name)
    return pp.value_and_grad(stages, squared, schedule)(*arguments)


def on_devices(name, engine, devices=("cuda:0",), overlapped=None, steps=2):
    """Run steps; returns the results of the last one on the CPU."""
    schedule, stages, arguments = problem(name, devices)
    step = pp.value_and_grad(stages, squared, schedule, engine=ENGINES[engine], overlapped=overlapped)
    for _ in range(steps):
        results = step(*arguments)
    return optree.tree_map(torch.Tensor.cpu, results)


def seeds(config, few):
    return range(20 if config.getoption("--large") else few)


@pytest.mark.parametrize(("engine", "place", "name"), cases(product(ENGINES, PLACES, PLAIN), FEW))
def test_the_bits_are_those_of_the_cpu(gpu, engine, name, place):
    assert same_bits(on_devices(name, engine, PLACES[place]), on_the_cpu(name))


@places
def test_residuals_are_moved_to_the_host_and_back(gpu, place):
    assert same_bits(on_devices("offload", "graph", PLACES[place]), on_the_cpu("offload"))
    assert gpu.issued["copy to the host"]


@engines
def test_two_streams_give_the_bits_of_the_cpu(simulate, engine, pytestconfig):
    for seed in seeds(pytestconfig, 2):
        simulate(seed=seed)
        assert same_bits(
            on_devices("dualpipev", engine, overlapped=pp.two_streams()), on_the_cpu("dualpipev")
        )


@places
def test_a_recording_changes_no_bits(gpu, place):
    schedule, stages, arguments = problem("1f1b", PLACES[place])
    results, timeline = pp.value_and_grad(stages, squared, schedule).record(*arguments)
    assert same_bits(optree.tree_map(torch.Tensor.cpu, results), on_the_cpu("1f1b"))
    assert timeline.makespan > 0


def test_random_numbers_are_those_of_the_seed(gpu):
    schedule = pp.one_f_one_b(2, 4)
    params = {s: {"w": torch.eye(D, device="cuda")} for s in range(2)}
    x = torch.ones(8, D, device="cuda")
    results = []
    for engine in "graph", "functional", "eager", "graph":
        step = pp.value_and_grad([dropout_stage] * 2, squared, schedule, engine=ENGINES[engine])
        results.append(step(params, x, x, seed=(7, len(results) // 3)))
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])
    assert not same_bits(results[0], results[3])


def ordering(gpu):
    """Return the calls of the package that order operations."""
    return sorted(call for call in gpu.orders if call[1])


def test_each_wait_that_is_left_out_is_reported(simulate):
    gpu, silent = simulate(), []
    on_devices("dualpipev", "graph", overlapped=pp.two_streams())
    calls = ordering(gpu)
    assert len(calls) == 4
    for call in calls:
        gpu = simulate()
        gpu.omitted.add(call)
        on_devices("dualpipev", "graph", overlapped=pp.two_streams())
        silent += [] if gpu.races else [call]
        gpu.races.clear()
    # Residuals live until both streams have met again, unless the forward fails.
    assert [kind for kind, _ in silent] == ["record_stream"]


@pytest.mark.parametrize("left_out", [False, True])
def test_residuals_outlive_a_pair_whose_forward_fails(gpu, left_out):
    def fail():
        raise KeyError("the forward fails")

    def run():
        residuals = torch.ones(4, device="cuda") * 2
        with pytest.raises(KeyError):
            pp.two_streams()(fail, (), lambda r: r + 1, (residuals,))

    run()
    if left_out:
        gpu.omitted.update(call for call in gpu.orders if call[0] == "record_stream")
        run()
    torch.empty(4, device="cuda")
    assert bool(gpu.races) is left_out
    gpu.races.clear()
