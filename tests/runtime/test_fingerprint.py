"""What functions read beside their arguments: a change is seen, wherever the number lies."""

from __future__ import annotations

import datetime
import gc
import weakref
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import ppfunc as pp
from ppfunc.runtime import stage_programs
from ppfunc.runtime.fingerprint import fingerprint
from ppfunc.stage import outline
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
    scaling, bound, partly, layer, whole = Scaling(), Scaling(), {"scale": 2.0}, Layer(), nn.Sequential(Layer())
    lazy = lambda p, x: x * (lambda: SCALE)()  # noqa: E731
    return {
        "a list": (closing(cell, lambda h: h[0]), lambda: cell.__setitem__(0, 3.0)),
        "a dictionary": (closing(options, lambda h: h["scale"]), lambda: options.update(scale=3.0)),
        "deep within": (closing(deep, lambda h: h["a"][0][0]["b"]), lambda: deep["a"][0][0].update(b=3.0)),
        "a long list": (closing(long, lambda h: h[0]), lambda: long.__setitem__(0, 3.0)),
        "deeper still": (closing(deeper, lambda h: h[0][0][0][0][0][0][0][0]), lambda: deeper[0][0][0][0][0][0][0].__setitem__(0, 3.0)),
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


@pytest.mark.parametrize("name", cases())
def test_a_new_step_function_takes_the_numbers_of_now(name):
    """A program shared with an earlier step function kept those of its trace: wrong numbers, without an error."""
    stage, change = cases()[name]
    losses = []
    for again in (False, True):
        if again:
            change()
        step = pp.value_and_grad([stage], product, pp.gpipe(1, 1))
        losses.append(step({0: {}}, torch.ones(1, 1), torch.ones(1, 1))[0])
    assert losses == [2, 3]


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


def test_a_stage_that_reads_the_same_is_traced_once(monkeypatch):
    """For all schedules and step functions with the same engine."""
    seen = []
    monkeypatch.setattr(stage_programs, "outline", lambda *args, **options: seen.append(0) or outline(*args, **options))
    held = {"scale": 2.0, "layer": Layer(), "more": Scaling(), "space": SimpleNamespace(scale=2.0)}

    def stage(p, x):
        return held["layer"](x) * p * held["more"].scale

    arguments = {s: normal(1) for s in range(2)}, normal(4, 1), normal(4, 1, seed=1)
    for schedule in (pp.gpipe(2, 2), pp.one_f_one_b(2, 2), pp.zb_h1(2, 2)):
        pp.value_and_grad([stage] * 2, squared, schedule)(*arguments)
    assert len(seen) == 2  # the first stage and the last


def test_order_and_identity_of_what_is_held_count():
    a, b = torch.zeros(1), torch.ones(1)
    held = [a, b]
    fn = closing(held, len)
    before = fingerprint(fn)
    for other in ([b, a], [a, a], [b, b], [a, b, b], [a], [a, b.clone()]):
        held[:] = other
        assert fingerprint(fn) != before
    held[:] = [a, b]
    assert fingerprint(fn) == before
    held[:] = [1, 2]
    before = fingerprint(fn)
    for other in ([1.0, 2], [True, 2], ["1", 2]):
        held[:] = other
        assert fingerprint(fn) != before


def test_counters_of_a_stage_do_not_keep_it_from_being_shared_and_what_lies_beside_them_counts():
    held = {"calls": 0, "log": [], "scale": 2.0}

    def stage(p, x):
        held["calls"] += 1
        held["log"].append(held["calls"])
        return x * held["scale"]

    def loss():
        return pp.value_and_grad([stage], product, pp.gpipe(1, 1))({0: {}}, torch.ones(1, 1), torch.ones(1, 1))[0]

    assert loss() == 2
    calls = held["calls"]
    assert loss() == 2
    assert held["calls"] == calls
    held["scale"] = 3.0
    assert loss() == 3


def test_nothing_is_kept_alive_and_nothing_is_taken_for_what_has_gone():
    class Held:
        pass

    held = [Held()]
    fn = closing(held, len)
    before, seen = fingerprint(fn), weakref.ref(held[0])
    held[0] = None
    gc.collect()
    assert seen() is None
    held[0] = Held()
    assert fingerprint(fn) != before


def test_too_much_to_look_at_and_what_cannot_be_told_apart_has_no_fingerprint():
    assert fingerprint(closing(list(range(10_000)), len)) is None
    assert fingerprint(closing(datetime.timedelta(1), len)) is None
    loop: list[object] = []
    loop.append(loop)
    fn = closing(loop, len)
    assert fingerprint(fn) == fingerprint(fn)


def test_a_stage_that_counts_its_calls_is_shared_all_the_same():
    calls = []

    def stage(p, x):
        calls.append(0)
        return x * p

    arguments = {s: normal(1) for s in range(4)}, normal(4, 1), normal(4, 1, seed=1)
    for schedule in (pp.gpipe(4, 2), pp.one_f_one_b(4, 2), pp.dualpipe(4, 8)):
        batch = arguments if schedule.microbatches == 2 else (arguments[0], normal(16, 1), normal(16, 1, seed=1))
        pp.value_and_grad([stage] * 4, squared, schedule)(*batch)
        assert len(calls) == 6  # evaluated and traced: the first stage, those in the middle, the last


def test_programs_are_not_shared_between_types_of_tensor():
    class Special(torch.Tensor):
        pass

    params = {s: torch.tensor([2.0]) for s in range(4)}
    params[2] = params[2].as_subclass(Special)
    step = pp.value_and_grad([lambda p, x: x * p.sum()] * 4, lambda y, t: y.sum(), pp.one_f_one_b(4, 1))
    with pytest.raises(pp.StageError, match="stage 2: .*Special"):
        step(params, torch.ones(1, 1), torch.ones(1, 1))
