"""Draws from the generators of Python and numpy are refused, by every engine, wherever the name comes
from.
"""

from __future__ import annotations

import random
import sys
import threading
from random import randint, random as by_another_name

import numpy
import pytest
import torch
from torch import nn

import ppfunc as pp
from ppfunc.stage import StageError, eager, functional, graph, stage_from_module

every = pytest.mark.parametrize("engine", [graph, functional, eager], ids=lambda e: e.__name__)
DRAWS = {
    "random": (lambda: random.random(), r"random \(random, called at .*test_foreign_draws.py:\d+"),
    "another name": (lambda: by_another_name(), r"random \(random, called at .*test_foreign_draws.py:\d+"),
    "randint": (lambda: randint(1, 3), r"random \(getrandbits, called at .*test_foreign_draws.py:\d+"),
    "shuffle": (
        lambda: random.shuffle([1, 2, 3]) or 1,
        r"random \(shuffle, called at .*test_foreign_draws.py:\d+",
    ),
    "seed": (lambda: random.seed(1) or 1, r"random \(seed, called at .*test_foreign_draws.py:\d+"),
    "numpy": (
        lambda: float(numpy.random.rand()),
        r"numpy.random \(rand, called at .*test_foreign_draws.py:\d+",
    ),
}


@pytest.fixture(autouse=True)
def as_before():
    functions = random.random, random.shuffle, numpy.random.rand, sys.getprofile()
    random.seed(7)  # one that seeds to where the generator is draws what it would draw again
    yield
    assert functions == (random.random, random.shuffle, numpy.random.rand, sys.getprofile())


@every
def test_a_state_that_is_restored_is_no_draw(engine):
    """So leaves torch 2.14 a branch that it cannot compile: it was called a draw."""

    def fn(w, x):
        random.setstate(random.getstate())
        numpy.random.set_state(numpy.random.get_state())
        return w * x if x.sum() > 0 else x

    if engine is graph:
        with pytest.raises(StageError, match="depend on the values"):
            engine(fn, (torch.ones(2), torch.ones(2)))
    else:
        engine(fn, (torch.ones(2), torch.ones(2)))


@every
@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("of_values", [False, True], ids=["", "after a look at values"])
def test_a_stage_that_draws_by_python_is_refused(engine, kind, of_values):
    draw, what = DRAWS[kind]

    def fn(w, x):
        if of_values and x.sum() > 0:
            x = x * 2
        return w * x * draw()

    refused = pytest.raises(
        StageError, match=f"^stage 2: it draws from the generator of {what}.* order in which microbatches run"
    )
    with refused:
        engine(fn, (torch.ones(2), torch.ones(2)), name="stage 2")


def test_a_module_in_a_step_is_refused_by_name():
    class Dropped(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (0 if random.random() < 0.5 else 2)

    fn, params, _ = stage_from_module(Dropped(2, 2))
    step = pp.value_and_grad([fn], lambda y, t: (y - t).sum(), pp.gpipe(1, 2))
    with pytest.raises(
        StageError,
        match=r"stage 0: it draws from the generator of random \(random, called at .*test_foreign_draws",
    ):
        step({0: params}, torch.ones(4, 2), torch.ones(4, 2))


def test_a_model_that_is_split_is_refused_by_whatever_name_it_draws():
    class Drops(nn.Sequential):
        def forward(self, x):
            return super().forward(x) * by_another_name()

    with pytest.raises(
        StageError,
        match=r"the model: it draws from the generator of random \(random, called at .*test_foreign_draws",
    ):
        pp.split(Drops(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2), at=["1"])


def test_draws_of_other_threads_and_of_a_generator_that_is_made_in_the_call_are_not_refused():
    over = threading.Event()

    def draw():
        while not over.wait(1e-4):
            random.random(), numpy.random.rand()

    def fn(w, x):
        over.wait(2e-3)
        return w * x * random.Random(0).random() * numpy.random.RandomState(0).rand()

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        program = graph(fn, (torch.ones(2), torch.ones(2)))
    finally:
        over.set()
        thread.join()
    want = random.Random(0).random() * numpy.random.RandomState(0).rand()
    assert program.forward(torch.ones(2), torch.ones(2))[0].tolist() == pytest.approx([want] * 2)
