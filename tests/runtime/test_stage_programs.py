"""Programs belong to function objects: who shares them, and which numbers of elsewhere they have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import ppfunc as pp
from ppfunc.runtime.lowering import stage_programs
from ppfunc.stage import eager, functional, graph, outline
from tests.models import normal, squared

SCALE = 2.0
settings = ModuleType("settings")
settings.scale = 2.0


class Settings:
    """A class that is used as a place for numbers."""

    scale = 2.0


@dataclass
class Scaling:
    """An object that is a stage, or has one."""

    scale: float = 2.0

    def __call__(self, p, x):
        return x * self.scale

    def stage(self, p, x):
        return self(p, x)

    @property
    def twice(self):
        return Settings.scale


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 2.0

    def forward(self, x):
        return x * self.scale


def product(y, t):
    return (y * t).sum()


def helper(x):
    return x * SCALE


def closing(held, get):
    return lambda p, x: x * get(held)


def by_default(p, x, scale=(2.0,)):
    return x * scale[0]


def cases():
    """A stage that doubles, and what makes it treble."""
    long, deeper = [2.0] * 10_000, [[[[[[[[2.0]]]]]]]]
    cell, options, deep, table = [2.0], {"scale": 2.0}, {"a": [({"b": 2.0},)]}, SimpleNamespace(scale=2.0)
    scaling, bound, partly, layer, whole = (
        Scaling(),
        Scaling(),
        {"scale": 2.0},
        Layer(),
        nn.Sequential(Layer()),
    )
    lazy = lambda p, x: x * (lambda: SCALE)()  # noqa: E731
    return {
        "a list": (closing(cell, lambda h: h[0]), lambda: cell.__setitem__(0, 3.0)),
        "a dictionary": (closing(options, lambda h: h["scale"]), lambda: options.update(scale=3.0)),
        "deep within": (closing(deep, lambda h: h["a"][0][0]["b"]), lambda: deep["a"][0][0].update(b=3.0)),
        "a long list": (closing(long, lambda h: h[0]), lambda: long.__setitem__(0, 3.0)),
        "deeper still": (
            closing(deeper, lambda h: h[0][0][0][0][0][0][0][0]),
            lambda: deeper[0][0][0][0][0][0][0].__setitem__(0, 3.0),
        ),
        "a namespace": (closing(table, lambda h: h.scale), lambda: setattr(table, "scale", 3.0)),
        "an object": (scaling, lambda: setattr(scaling, "scale", 3.0)),
        "a method": (bound.stage, lambda: setattr(bound, "scale", 3.0)),
        "a partial": (partial(lambda o, p, x: x * o["scale"], partly), lambda: partly.update(scale=3.0)),
        "a global": (lambda p, x: x * SCALE, lambda: globals().update(SCALE=3.0)),
        "a global of a helper": (lambda p, x: helper(x), lambda: globals().update(SCALE=3.0)),
        "a global of an inner function": (lazy, lambda: globals().update(SCALE=3.0)),
        "a class": (lambda p, x: x * Settings.scale, lambda: setattr(Settings, "scale", 3.0)),
        "a property": (closing(Scaling(), lambda h: h.twice), lambda: setattr(Settings, "scale", 3.0)),
        "a module of Python": (lambda p, x: x * settings.scale, lambda: setattr(settings, "scale", 3.0)),
        "a module of torch": (lambda p, x: layer(x), lambda: setattr(layer, "scale", 3.0)),
        "a module within a stage": (pp.stage_from_module(whole).fn, lambda: setattr(whole[0], "scale", 3.0)),
        "a default": (by_default, lambda: setattr(by_default, "__defaults__", ((3.0,),))),
    }


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    monkeypatch.setattr(Settings, "scale", 2.0)
    monkeypatch.setattr(settings, "scale", 2.0)
    monkeypatch.setattr(by_default, "__defaults__", ((2.0,),))


@pytest.mark.parametrize("engine", [graph, functional, eager], ids=lambda e: e.__name__)
@pytest.mark.parametrize("name", cases())
def test_a_step_takes_the_numbers_of_its_beginning(name, engine):
    """A program kept those of its trace: wrong numbers, without an error; also in another step function."""
    stage, change = cases()[name]
    steps = [pp.value_and_grad([stage], product, pp.gpipe(1, 1), engine=engine) for _ in range(2)]
    given = {0: {}}, torch.ones(1, 1), torch.ones(1, 1)
    losses = [steps[0](*given)[0]]
    change()
    losses += [step(*given)[0] for step in steps]
    assert losses == [2, 3, 3] and steps[0].cache_info().misses == 2


def test_a_loss_function_is_read_too():
    weight = [1.0]

    def loss_fn(y, t):
        return squared(y, t) * weight[0]

    def stage(p, x):
        return x * p

    arguments = {0: normal(1)}, normal(2, 1), normal(2, 1, seed=1)
    first = pp.value_and_grad([stage], loss_fn, pp.gpipe(1, 1))(*arguments)[0]
    weight[0] = 3.0
    torch.testing.assert_close(pp.value_and_grad([stage], loss_fn, pp.gpipe(1, 1))(*arguments)[0], 3 * first)


@pytest.fixture
def evaluated(monkeypatch):
    """The names of the stages that are evaluated, as often as they are."""
    names = []

    def noted(fn, example, **options):
        names.append(options["name"])
        return outline(fn, example, **options)

    monkeypatch.setattr(stage_programs, "outline", noted)
    return names


def stage(p, x):
    return x * p


def arguments(stages=4, rows=4):
    return {s: normal(1) for s in range(stages)}, normal(rows, 1), normal(rows, 1, seed=1)


def test_a_function_object_is_traced_once_for_all_its_stages(evaluated):
    """The first stage, whose input needs no gradient, those in the middle, and the last with its loss."""
    calls = []

    def counting(p, x):
        calls.append(0)
        return stage(p, x)

    pp.value_and_grad([counting] * 4, squared, pp.one_f_one_b(4, 2))(*arguments())
    assert evaluated == ["stage 0", "stage 1", "stage 3"]
    assert len(calls) == 6  # evaluated and traced
    pp.value_and_grad([stage] * 4, squared, pp.dualpipe(4, 8))(*arguments(rows=8))
    assert len(evaluated) == 6


def test_microbatches_of_known_forms_are_not_traced_again_in_another_order(evaluated):
    params, inputs, targets = arguments(1, 6)
    step = pp.value_and_grad([stage], squared, pp.gpipe(1, 3))
    losses = []
    for sizes in ([3, 2, 1], [1, 2, 3], [2, 3, 1]):
        batch = [pp.Microbatches(list(t.split(sizes))) for t in (inputs, targets)]
        losses.append(step(params, *batch, loss_weights=[n / 6 for n in sizes])[0])
        assert len(evaluated) == 3
    assert step.cache_info().misses == 3
    torch.testing.assert_close(losses, [losses[0]] * 3)


def test_a_step_that_is_compiled_is_for_what_was_read_in_its_trace():
    scale = [2.0]
    step = pp.value_and_grad([closing(scale, lambda h: h[0])], product, pp.gpipe(1, 1))
    given = {0: {}}, torch.ones(1, 1), torch.ones(1, 1)
    assert step(*given)[0] == 2
    compiled = step.lower(*given).compile()
    scale[0] = 3.0
    with pytest.raises(
        ValueError, match=r"since the step was lowered: held\[0\] = 3.0; lower and compile it"
    ):
        compiled(*given)
    assert step(*given)[0] == step.lower(*given).compile()(*given)[0] == 3
    scale[0] = 2.0
    assert step(*given)[0] == compiled(*given)[0] == 2
    assert step.cache_info().misses == 2


def test_a_trainer_evaluates_by_the_programs_of_its_steps(evaluated):
    params, inputs, targets = arguments(2)
    trainer = pp.Trainer([stage] * 2, squared, pp.gpipe(2, 2), pp.optim.sgd(0.1))
    state = trainer.init(params)
    trainer.step(state, inputs, targets)
    assert len(evaluated) == 2
    trainer.evaluate(state, inputs, targets)
    assert len(evaluated) == 2


def test_the_mode_of_a_module_that_is_not_called_counts_wherever_it_lies():
    """A stage reads it; it is found in a closure, a global, a module of Python, an object, a partial."""

    def by_mode(module, p, x):
        return x * (2.0 if module.training else 3.0)

    class Holding:
        def __init__(self, module):
            self.module = module

        def __call__(self, p, x):
            return by_mode(self.module, p, x)

    layer = settings.layer = nn.Identity()
    globals()["LAYER"] = layer
    stages = [
        lambda p, x: by_mode(layer, p, x),
        lambda p, x: (lambda: by_mode(LAYER, p, x))(),  # noqa: F821
        lambda p, x: by_mode(settings.layer, p, x),
        partial(by_mode, layer),
        Holding(layer),
        Holding(layer).__call__,
    ]
    for fn in stages:
        layer.train()
        step = pp.value_and_grad([fn], product, pp.gpipe(1, 1))
        given = {0: {}}, torch.ones(1, 1), torch.ones(1, 1)
        assert step(*given)[0] == 2
        layer.eval()
        assert step(*given)[0] == 3


def test_programs_are_not_shared_between_types_of_tensor():
    class Special(torch.Tensor):
        pass

    params = {s: torch.tensor([2.0]) for s in range(4)}
    params[2] = params[2].as_subclass(Special)
    step = pp.value_and_grad([lambda p, x: x * p.sum()] * 4, lambda y, t: y.sum(), pp.one_f_one_b(4, 1))
    with pytest.raises(pp.StageError, match="stage 2: .*Special"):
        step(params, torch.ones(1, 1), torch.ones(1, 1))
