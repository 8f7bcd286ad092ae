"""Layers weighed by parameters, by a pattern on their names, and by time."""

from __future__ import annotations

import re

import pytest

from ppfunc.parallel import (
    count_layer_parameters,
    layer_name,
    measure_layers,
    partition_by_parameters,
    partition_by_pattern,
    partition_by_time,
    partition_by_weights,
)


class Tensor:
    def __init__(self, size, requires_grad=True):
        self.size, self.requires_grad = size, requires_grad

    def numel(self):
        return self.size


class Module:
    def __init__(self, *parameters):
        self._parameters = parameters

    def parameters(self):
        return iter(self._parameters)


def test_parameters_of_modules_trees_and_numbers():
    shared = Tensor(5)
    layers = [
        Module(Tensor(3), Tensor(100, requires_grad=False)),
        {"w": Tensor(4), "b": [Tensor(1), 7]},
        (shared, shared),
        9,
        {},
    ]
    assert count_layer_parameters(layers) == (3, 5, 5, 9, 0)
    assert partition_by_parameters(layers, 2).boundaries == (0, 3, 5)
    assert partition_by_parameters([1, 1, 1, 3], 2, "uniform").boundaries == (0, 2, 4)


def test_methods():
    weights = [6, 1, 6, 1, 6]
    assert partition_by_weights(weights, 2, "uniform").boundaries == (0, 3, 5)
    assert partition_by_weights(weights, 2).loads(weights) == (13, 7)
    assert partition_by_weights(weights, 2, "min_range").loads(weights) == (13, 7)
    with pytest.raises(
        ValueError, match="unknown method 'best': expected 'uniform', 'balanced' or 'min_range'"
    ):
        partition_by_weights(weights, 2, "best")


def test_a_pattern_keeps_its_case_and_its_classes():
    names = ["embed", "Block.0", "Block.1", "dropout", "Block.2", "Block.3", "head"]
    # Lower case would turn \D into \d, and match nothing here.
    assert partition_by_pattern(names, r"^\D+\.\d$", 2).boundaries == (0, 4, 7)
    with pytest.raises(ValueError, match=r"no layer matches 'block'; the names, case kept, are \['Block.0'"):
        partition_by_pattern(names, "block", 2)
    for ignoring in ("(?i)block", re.compile("block", re.IGNORECASE)):
        assert partition_by_pattern(names, ignoring, 2).boundaries == (0, 4, 7)
    assert partition_by_pattern(names, "Block|head", 5, "min_range").layers == 7
    with pytest.raises(ValueError, match="'.*' is not a regular expression: "):
        partition_by_pattern(names, "(", 2)


def test_names_of_layers():
    def attention():
        pass

    assert [layer_name(x) for x in ("mlp.0", attention, Module, Module())] == [
        "mlp.0",
        "attention",
        "Module",
        "Module",
    ]
    assert partition_by_pattern([Module(), attention, Module()], "^Module$", 2).boundaries == (0, 2, 3)


def test_measured_times():
    now = 0.0
    calls = []

    def layer(seconds):
        def run(x):
            nonlocal now
            # The first call is slow, as when kernels are loaded.
            now += seconds + (100 if x not in calls else 0)
            calls.append(x)
            return x + 1

        return run

    layers = [layer(s) for s in (1.0, 1.0, 2.0, 4.0)]
    waits = []
    times = measure_layers(layers, 0, repeats=3, clock=lambda: now, synchronize=lambda: waits.append(now))
    assert times == (1.0, 1.0, 2.0, 4.0)
    assert len(waits) == 2 * 4 * 4
    calls.clear()
    assert measure_layers(layers, 0, repeats=1, clock=lambda: now) == (1.0, 1.0, 2.0, 4.0)
    partition = partition_by_time(layers, 0, 2, clock=lambda: now)
    assert partition.loads(times) == (4.0, 4.0)
    with pytest.raises(ValueError, match="repeats = 0, expected an integer of at least 1"):
        measure_layers(layers, 0, repeats=0)
    assert min(measure_layers([sum], [1, 2])) >= 0
