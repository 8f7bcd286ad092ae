"""Draws from the generators of Python and numpy are refused, by every engine, wherever the name comes
from.
"""

from __future__ import annotations

import random
import threading
from random import randint, random as by_another_name

import numpy
import pytest
import torch
from numpy.random import rand
from torch import nn

import ppfunc as pp
from ppfunc.stage import StageError, graph, stage_from_module
from tests.stage.conftest import every

DRAWS = {
    "random": (lambda: random.random(), "random"),
    "another name": (lambda: by_another_name(), "random"),
    "randint": (lambda: randint(1, 3), "random"),
    "shuffle": (lambda: random.shuffle([1, 2, 3]) or 1, "random"),
    "numpy": (lambda: float(numpy.random.rand()), "numpy.random"),
    "another name of numpy's": (lambda: float(rand()), "numpy.random"),
}


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

    said = f"^stage 2: it draws from the generator of {what}, .* order in which micro"
    with pytest.raises(StageError, match=said):
        engine(fn, (torch.ones(2), torch.ones(2)), name="stage 2")


@every
def test_a_stage_that_seeds_before_it_draws_has_the_same_numbers_in_every_call(engine):
    def fn(w, x):
        random.seed(1)
        return w * x * random.random()

    program = engine(fn, (torch.ones(2), torch.ones(2)))
    random.seed(1)
    want = random.random()
    for _ in range(2):
        assert program.forward(torch.ones(2), torch.ones(2))[0].tolist() == pytest.approx([want] * 2)


def test_a_module_in_a_step_is_refused_by_name():
    class Dropped(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (0 if random.random() < 0.5 else 2)

    fn, params, _ = stage_from_module(Dropped(2, 2))
    step = pp.value_and_grad([fn], lambda y, t: (y - t).sum(), pp.gpipe(1, 2))
    with pytest.raises(StageError, match="stage 0: it draws from the generator of random, "):
        step({0: params}, torch.ones(4, 2), torch.ones(4, 2))


def test_a_model_that_is_split_is_refused_by_whatever_name_it_draws():
    class Drops(nn.Sequential):
        def forward(self, x):
            return super().forward(x) * by_another_name()

    with pytest.raises(StageError, match="the model: it draws from the generator of random, "):
        pp.split(Drops(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2), at=["1"])


def test_a_draw_of_another_thread_and_of_a_generator_that_is_made_in_the_call_are_not_refused():
    drawn = []

    def fn(w, x):
        if not drawn:
            thread = threading.Thread(target=lambda: drawn.append((random.random(), numpy.random.rand())))
            thread.start()
            thread.join()
        return w * x * random.Random(0).random() * numpy.random.RandomState(0).rand()

    program = graph(fn, (torch.ones(2), torch.ones(2)))
    want = random.Random(0).random() * numpy.random.RandomState(0).rand()
    assert drawn and program.forward(torch.ones(2), torch.ones(2))[0].tolist() == pytest.approx([want] * 2)
