"""Mistakes of one call are answered by the noun that is wrong and what to write, each in a row of a table."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from copy import deepcopy

import pytest
import torch
from torch import nn

import ppfunc as pp
from ppfunc.schedule import (
    B,
    F,
    Flow,
    ScheduleError,
    gpipe,
    one_f_one_b,
    simulate,
    single_chain,
    to_grid,
    to_svg,
    to_trace,
)
from ppfunc.stage.tree import tree_map
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


def of_split(x, *, rows=8, dtype=None, cut=torch.float32):
    """A step of a split of rows of four numbers, with these inputs."""
    split = pp.split(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(cut), torch.ones(2, 4, dtype=cut), at=2
    )
    params = tree_map(lambda t: t.to(dtype), split.params)
    return pp.value_and_grad(split, squared, SCHEDULE)(params, x, torch.ones(rows, 4))


def of_weights(weights, stages=2):
    """The state of a trainer that is given these weights."""
    with new_trainer([dense] * 2, squared, SCHEDULE, pp.optim.sgd(0.1)) as trainer:
        return trainer.init({s: {"w": weights} for s in range(stages)})


def sending(params, x):
    return pp.Output(dense(params, x), skips={2: x})


def reading(params, x, carry):
    return pp.Output(x + carry["h"], carry=carry)


SLICES = pp.microbatch(torch.ones(4, 6, 4), 2, slices=2)
FORK = pp.arrange([0, 1, 1], [Flow((0, 1, 2), range(4), ((0, 1), (0, 2)))])
IN_PARTS = pp.vocabulary_parallel([dense, dense], [2, 2])
THREE = pp.vocabulary_parallel([dense] * 3, [2, 2])
PAIR = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
ONES = torch.ones(8, 4)
MISTAKES = {
    "the number of stages without its name": (
        lambda: pp.split(PAIR, ONES, 2),
        TypeError,
        r"^kwargs: got 2 of type int, expected a dictionary .*; where to cut is given by name, at=2$",
    ),
    "names of modules without theirs": (
        lambda: pp.split(PAIR, ONES, ["1"]),
        TypeError,
        r"^kwargs: got \['1'\] of type list, .* by name, at=\['1'\]$",
    ),
    "inputs of another width": (
        lambda: of_split(torch.ones(8, 5)),
        pp.StageError,
        r"called with float32\[2,5\], where the split had float32\[2,4\], it raised .*inputs of the form",
    ),
    "a list of microbatches to a split": (
        lambda: of_split([*torch.ones(16, 4).chunk(4)], rows=4),
        pp.StageError,
        r"called with \[float32\[1,4\], .*split had float32\[2,4\], .* several microbatches as ppfunc",
    ),
    "a list of numbers": (
        lambda: of_split([0.0] * 500),
        TypeError,
        r"^inputs: got \[0.0, .*\.\.\.\] of type list, expected tensors; make the list a tensor",
    ),
    "a model in halves, and a batch that is not": (
        lambda: of_split(ONES, cut=torch.bfloat16),
        pp.PipelineError,
        r"cast the batch to the dtype of the parameters, x.to\(dtype\), or have a trainer cast both",
    ),
    "parameters in halves, and a batch that is not": (
        lambda: of_split(ONES, dtype=torch.bfloat16),
        pp.PipelineError,
        r"cast the batch to the dtype of the parameters, x.to\(dtype\), or have a trainer cast both",
    ),
    "the same by hand": (
        lambda: pp.value_and_grad([dense] * 2, squared, SCHEDULE)(
            {s: {"w": torch.eye(4, dtype=torch.bfloat16)} for s in range(2)}, ONES, ONES
        ),
        pp.PipelineError,
        r"cast the batch to the dtype of the parameters, x.to\(dtype\), or have a trainer cast both",
    ),
    "a rate that is set": (
        lambda: setattr(pp.optim.adamw(0.1), "lr", 0),
        AttributeError,
        r"^optimizer.lr = 0 of type int: an optimizer is a value; make another one, .*a function of the",
    ),
    "clip and optimizer in a list": (
        lambda: pp.optim.chain([pp.optim.clip_by_global_norm(1.0), pp.optim.sgd(0.1)]),
        TypeError,
        r"^clip: got \[Clip.* of type list, expected a clip, then an optimizer: chain\(",
    ),
    "a clip alone": (
        lambda: pp.optim.chain(pp.optim.clip_by_global_norm(1.0)),
        TypeError,
        r"^optimizer: got None of type NoneType, expected init and update; make an opt",
    ),
    "parameters before the rate": (
        lambda: pp.optim.adamw([ONES], lr=0.1),
        TypeError,
        r"^adamw\(\) got multiple values for argument 'lr', which .* already: write lr= alone; it takes lr",
    ),
    "the optimizer of the rest without its name": (
        lambda: pp.optim.muon(0.1, pp.optim.adamw(0.1)),
        TypeError,
        r"^momentum is Optimizer.*, expected a number; the optimizer of .* is given as rest=$",
    ),
    "stages and weights in each other's place": (
        lambda: pp.parallel.partition_balanced(2, [1, 2, 3]),
        TypeError,
        r"^weights: got 2 of type int, expected a list of numbers, one per layer; the order is weights, st",
    ),
    **{
        f"an option of {engine.__name__}": (
            lambda engine=engine: engine(remat="full"),
            TypeError,
            rf"^{engine.__name__}: got remat, .*no options: give engine=ppfunc.engines.{engine.__name__} it",
        )
        for engine in (pp.engines.functional, pp.engines.eager)
    },
    "a text in the place of a schedule": (
        lambda: simulate("1f1b"),
        ScheduleError,
        r"^schedule: got '1f1b' of type str, expected a Schedule, such as ppfunc.one_f_one_b\(ranks=4, micro",
    ),
    "the number of microbatches in the place of these": (
        lambda: pp.Microbatches(4),
        TypeError,
        r"^trees: got 4 of type int, expected a tree for each microbatch; ppfunc.microbatch\(batch, m\) cuts",
    ),
    "the number of microbatches before the batch": (
        lambda: pp.microbatch(4, ONES),
        ValueError,
        r"^microbatches = tensor.* of type Tensor, expected an integer of at least 1",
    ),
    "a folder without checkpoints": (
        lambda: pp.checkpoint.load(None, like={}),
        TypeError,
        r"^folder: got None of type NoneType, expected a path; where there is no checkpoint, latest",
    ),
    "weights that are nowhere": (
        lambda: pp.split(PAIR, ONES, at=2).load("nowhere"),
        ValueError,
        r"^weights: there is no file nowhere; give a safetensors file, a folder of them, or a state dict$",
    ),
    "parameters before the folder": (
        lambda: pp.checkpoint.export({0: {}}, "folder"),
        TypeError,
        r"^folder: got {0: {}} of type dict, expected a path first, then the parameters$",
    ),
    "a class to tune": (
        lambda: pp.tune(Pictures, ONES, squared, ranks=2, optimizer=pp.optim.sgd(0.1)),
        TypeError,
        r"^model: got <class .*Pictures'> of type type, expected a module, or a model that was split$",
    ),
    "parameters of all stages on one rank": (
        lambda: of_weights(torch.eye(4), stages=3),
        ValueError,
        r"^params: got the stages \[0, 1, 2\], .* give those, as {s: params\[s\] for s in \[0, 1\]}$",
    ),
    "parameters without values": (
        lambda: of_weights(torch.empty(4, 4, device="meta")),
        ValueError,
        r"^params\[0\]\['w'\]: got a tensor on the device meta.*; load or materialise it \(split.load, ",
    ),
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
        r"plan\(\) got .* 'memory'; .*it takes ranks, microbatches, costs, cap=, ",
    ),
    **{
        f"the name {name}": (lambda name=name: getattr(pp, name), AttributeError, message)
        for name, message in {
            "hessian": r"no attribute 'hessian'; help\(ppfunc\) says: Hessian ``hvp`` multiplies it with",
            "Flow": r"no attribute 'Flow'; help\(ppfunc\) says: flow .*``schedule.Flow``",
            "simulat": "did you mean 'simulate'?",
            "nothing_alike": r"; dir\(ppfunc\) lists its names$",
        }.items()
    },
    "inputs and targets in a tuple": (
        lambda: pp.value_and_grad([dense] * 2, squared, SCHEDULE)(
            {s: {"w": torch.eye(4)} for s in range(2)}, (ONES, ONES)
        ),
        pp.StageError,
        r"x = \(float32.* Instead: read x as the tuple of the outputs of .*targets are an argument beside",
    ),
    "a skip connection that is not read": (
        step_of([sending, dense, dense], pp.with_skips(one_f_one_b(3, 4), [(0, 2)])),
        pp.StageError,
        r"stage 2: .*Instead: read Received\(x, skips={source: value}\), .* None for a microbatch",
    ),
    "a skip connection that is not sent": (
        step_of([dense] * 3, pp.with_skips(one_f_one_b(3, 4), [(0, 2)])),
        pp.StageError,
        r"stages \[\], the schedule has them to \[2\]; return Output\(y, skips={2: tree}\)",
    ),
    "a skip connection that is not declared": (
        step_of([sending, dense, dense], one_f_one_b(3, 4)),
        pp.StageError,
        r"to the stages \[2\], .* to \[\]; declare them by ppfunc.with_skips\(schedule",
    ),
    "a carry without a first one": (
        lambda: pp.value_and_grad([reading] * 2, squared, pp.seq1f1b(2, 2, 2))(
            {0: (), 1: ()}, SLICES, SLICES
        ),
        pp.StageError,
        r"Instead: take None for the carry of the first slice, or give the step one, carry=",
    ),
    "a tie that the parts of an output layer do not know": (
        lambda: pp.value_and_grad(THREE, THREE.loss_fn, pp.with_parts(SCHEDULE))(
            THREE.cut({0: {"w": ONES[:4]}, 1: {"w": torch.eye(4)}, 2: {"w": ONES[:4]}}), ONES, ONES.long()
        ),
        ValueError,
        r"params\[0\] 'w' and params\[2\] 'w' share memory; .*give vocabulary_parallel the tie, tied=$",
    ),
    "a schedule that leads back, and a split": (
        lambda: pp.evaluate(pp.split(PAIR, ONES, at=2), None, pp.decode(2, 2, 3), return_outputs=True),
        ValueError,
        r"^stages: got a split, and the schedule 'decode' with the skip connection \(1, 0\), .*generate.py",
    ),
    "an end of a graph that gives nothing": (
        step_of([dense, lambda p, x: pp.Output(()), dense], FORK),
        pp.StageError,
        r"stage 1: .*no edge of the schedule leads on from it, and it returns nothing; return Output",
    ),
    "an end of a graph that gives an output": (
        step_of([dense] * 3, FORK),
        pp.StageError,
        r"stage 1: .*it returns an output that nobody takes; return Output\(\(\), loss=",
    ),
    "a stage that takes targets": (
        step_of([dense, lambda p, x, target: pp.Output((), loss=squared(x, target)), dense], FORK),
        pp.StageError,
        r"stage 1: .*the loss function alone takes targets: further labels are extras={stage: labels}",
    ),
    "extras of a stage that is not there": (
        lambda: pp.value_and_grad([dense] * 2, squared, SCHEDULE)(
            *models.problem(SCHEDULE), extras={7: ONES}
        ),
        ValueError,
        r"^extras: got the stages \[7\], this process runs \[0, 1\]; give some of those$",
    ),
    "the state of an optimizer, joined": (
        lambda: IN_PARTS.join({s: {"mean": ONES, "updates": torch.tensor(1)} for s in range(4)}),
        ValueError,
        r"^params\[1\]: got tensor\(1\) .*expected rows of the vocabulary; of the state of an optimizer",
    ),
    "the state of a trainer, joined": (
        lambda: IN_PARTS.join(new_trainer([dense] * 2, squared, SCHEDULE, pp.optim.sgd(0.1))),
        TypeError,
        r"^params: got .*Trainer.*, expected Mapping\[int, Any\]$",
    ),
    "a number in the place of a list": (
        lambda: to_svg(SCHEDULE, edges=2),
        TypeError,
        r"^edges: got 2 of type int, expected Iterable\[int\]$",
    ),
    "a flow in the place of a list": (
        lambda: pp.arrange([0, 1], Flow((0, 1), range(4))),
        ScheduleError,
        r"^flow 0 is a tuple, expected a Flow$",
    ),
    "the number of microbatches of a flow": (
        lambda: pp.arrange([0, 1], [Flow((0, 1), 4)]),
        ScheduleError,
        r"flow 0 has microbatches 4, expected a range with at least one, in steps of one, such as range\(8\)",
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
    "control flow": (
        lambda: pp.split(Deciding(), torch.ones(4, 4), at=["b"]),
        pp.StageError,
        r"values of tensors .*test_messages.py:.*torch.where chooses",
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


NOTHING_TRAINS = (
    "params: all parameters are frozen, or of integers, so that none trains; set requires_grad of"
)


@pytest.mark.parametrize(
    "weight, trainable, told",
    [
        (torch.eye(4), None, False),
        (torch.eye(4), {0: False}, False),
        (torch.eye(4), lambda params: False, True),
        (torch.eye(4, dtype=torch.int64), None, True),
    ],
    ids=["all", "one", "none", "integers"],
)
def test_a_step_in_which_nothing_trains_says_so(weight, trainable, told, recwarn):
    params = {s: {"w": weight.clone()} for s in range(2)}
    step = pp.value_and_grad([lambda p, x: x * p["w"].sum()] * 2, squared, SCHEDULE, trainable=trainable)
    step(params, ONES, ONES)
    texts = [str(w.message) for w in recwarn if str(w.message).startswith(NOTHING_TRAINS)]
    assert len(texts) == told
    evaluate = pp.evaluate([lambda p, x: x * p["w"].sum()] * 2, squared, SCHEDULE)
    evaluate(params, ONES, ONES)
    assert len(texts) == told


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered(mistake):
    call, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        call()


BY_POSITION = {
    "B",
    "F",
    "I",
    "W",
    "overlap",
    "parse_instruction",
    "parts_of",
    "find_builder",
    "prime_factors",
}
FUNCTIONS = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (pp, pp.schedule, pp.parallel, pp.optim, pp.checkpoint)
    for name in module.__all__
    if inspect.isfunction(getattr(module, name)) and name not in BY_POSITION
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_name_their_arguments(name):
    parameters = inspect.signature(FUNCTIONS[name]).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return  # they are for another function
    with pytest.raises(
        TypeError, match=r"\(\) got .*'not_an_argument'.*; it takes |: got not_an_argument, and"
    ):
        FUNCTIONS[name](not_an_argument=1)


def test_values_whose_arguments_are_named_are_values_still():
    for value in (pp.Axes(data="dp"), pp.Costs(forward=2), pp.Output(1), pp.Precision()):
        assert pickle.loads(pickle.dumps(value)) == deepcopy(value) == value
    assert pp.Axes()._replace(pipe="p").pipe == "p" and pp.Costs(1, 2).backward_input == 2


def test_a_timeline_is_drawn_with_its_schedule():
    timeline = simulate(gpipe(2, 2), pp.Costs(forward=3))
    for draw in (to_trace, to_svg, to_grid):
        assert draw(timeline) != draw(timeline.schedule)
