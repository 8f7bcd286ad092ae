"""Mistakes of one call are answered by the noun that is wrong and what to write, each in a row of a table."""

from __future__ import annotations

import dataclasses
import pickle
from copy import deepcopy

import pytest
import torch
from torch import nn

import ppfunc as pp
from ppfunc.schedule import (
    B,
    F,
    ScheduleError,
    gpipe,
    one_f_one_b,
    simulate,
    single_chain,
    to_grid,
    to_svg,
    to_trace,
)
from tests import models
from tests.models import dense, new_trainer, squared

SCHEDULE = one_f_one_b(2, 4)


@dataclasses.dataclass
class Held:
    h: torch.Tensor


def twice(stage):
    programs = [[F(0, 0), B(0, 0)], [F(1, 0), B(1, 0)]]
    programs[stage].append(B(stage, 0))
    return single_chain("mine", [0, 1], 1, programs)


def step_of(stages, schedule=SCHEDULE):
    return lambda: pp.value_and_grad(stages, squared, schedule)(*models.problem(schedule))


def of_pair():
    params, *pair = models.problem(SCHEDULE)
    with new_trainer([dense] * 2, squared, SCHEDULE, pp.optim.sgd(0.1)) as trainer:
        return trainer.step(trainer.init(params), tuple(pair))


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, h, pixels):
        return self.b(self.a(h) + pixels.view(len(h), -1, 4).sum(1))


def of_more_rows():
    x, pixels = torch.ones(8, 4), torch.ones(128, 4)
    split = pp.split(Pictures(), (x, pixels), at=["b"])
    return pp.value_and_grad(split, squared, SCHEDULE)(split.params, (x, pixels), x)


class Deciding(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        if x.sum() > 0:
            x = 2 * x
        return self.b(x)


def of_module(first):
    fn, params, state = pp.stage_from_module(first)
    x = torch.zeros(8, dtype=torch.long) if isinstance(first, nn.Embedding) else torch.ones(8, 4)
    step = pp.value_and_grad([fn, dense], squared, SCHEDULE, has_aux=state is not None)
    given = {} if state is None else {"state": {0: state}}
    return step({0: params, 1: {"w": torch.eye(4)}}, x, torch.ones(8, 4), **given)


MISTAKES = {
    "an option of an engine": (
        lambda: pp.engines.graph(rematt="full"),
        TypeError,
        r"graph\(\) got .* 'rematt'; did you mean 'remat'\?; it takes stage, remat",
    ),
    "a field of Precision": (
        lambda: pp.Precision(dtype=torch.float16),
        TypeError,
        r"^Precision\(\) got .* 'dtype'; .*it takes compute, reduce, master, scale$",
    ),
    "a field of Costs": (
        lambda: pp.Costs(fwd=1),
        TypeError,
        r"^Costs\(\) got .* 'fwd'; did you mean 'forward'\?; it takes forward, ",
    ),
    "a field of Axes": (
        lambda: pp.Axes(pipeline="pp"),
        TypeError,
        r"^Axes\(\) got .* 'pipeline'; did you mean 'pipe'\?; it takes pipe, data, model, ",
    ),
    "a field of Output": (
        lambda: pp.Output(1, metric=2),
        TypeError,
        r"^Output\(\) got .* 'metric'; did you mean 'metrics'\?; it takes y, loss, metrics, ",
    ),
    "no microbatches": (
        lambda: pp.Microbatches(),
        TypeError,
        r"^Microbatches\(\) missing 1 required positional argument: 'trees'.*; it takes trees$",
    ),
    "an argument of plan": (
        lambda: pp.plan(2, 4, pp.Costs(), memory=3),
        TypeError,
        r"plan\(\) got .* 'memory'; .*it takes ranks, microbatches, costs, cap, ",
    ),
    "a backward twice on the first rank": (
        step_of([dense] * 2, twice(0)),
        ScheduleError,
        "is computed twice, first at step 1",
    ),
    "a backward twice on the last rank": (
        step_of([dense] * 2, twice(1)),
        ScheduleError,
        "is computed twice, first at step 1",
    ),
    "a tensor as a rate": (
        lambda: pp.optim.sgd(torch.tensor(0.1)),
        TypeError,
        r"lr is tensor\(0.1000\) of type Tensor, expected a number, or a function .* or lambda n: lr of a",
    ),
    "more rows of pictures": (of_more_rows, ValueError, r"microbatches of any form are ppfunc.Microbatches"),
    "loss and schedule in each other's place": (
        lambda: pp.value_and_grad([dense] * 2, SCHEDULE, squared),
        TypeError,
        r"loss_fn: got Schedule\('1f1b'.*; the order is stages, loss_fn, schedule",
    ),
    "the same for a trainer": (
        lambda: pp.Trainer([dense] * 2, SCHEDULE, squared, pp.optim.sgd(0.1)),
        TypeError,
        r"loss_fn: got Schedule\('1f1b'.*; the order is stages, loss_fn, schedule",
    ),
    "a batch as one argument": (
        of_pair,
        ValueError,
        r"targets: got None.* the argument after inputs; inputs is a pair: \*batch",
    ),
    "control flow": (
        lambda: pp.split(Deciding(), torch.ones(4, 4), at=["b"]),
        pp.StageError,
        r"values of tensors .*test_messages.py:.*torch.where and torch.cond",
    ),
    "an average of all batches": (
        lambda: of_module(nn.BatchNorm1d(4, momentum=None)),
        pp.StageError,
        "momentum=",
    ),
    "sparse gradients": (
        lambda: of_module(nn.Embedding(5, 4, sparse=True)),
        pp.StageError,
        "leave out sparse=True",
    ),
    "a plain dataclass": (
        step_of([lambda p, x: Held(dense(p, x)), lambda p, held: dense(p, held.h)]),
        pp.StageError,
        r"Held.*torch.export.register_dataclass\(Held\)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered(mistake):
    call, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        call()


def test_values_whose_arguments_are_named_are_values_still():
    for value in (pp.Axes(data="dp"), pp.Costs(forward=2), pp.Output(1), pp.Precision()):
        assert pickle.loads(pickle.dumps(value)) == deepcopy(value) == value
    assert pp.Axes()._replace(pipe="p").pipe == "p" and pp.Costs(1, 2).backward_input == 2


def test_a_timeline_is_drawn_with_its_schedule():
    timeline = simulate(gpipe(2, 2), pp.Costs(forward=3))
    for draw in (to_trace, to_svg, to_grid):
        assert draw(timeline) == draw(timeline.schedule, timeline) != draw(timeline.schedule)
        with pytest.raises(ScheduleError, match="Timeline, expected a Schedule"):
            draw(timeline, timeline)
