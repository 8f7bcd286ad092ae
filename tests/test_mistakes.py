"""Arguments and objects that do not fit are answered by what to write."""

from __future__ import annotations

import io
import pickle
import re
from collections import UserDict
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn

import ppfunc as pp
from ppfunc._checks import naming_attributes
from ppfunc.runtime.lowering.comparison import require_same_terms
from ppfunc.schedule import F, check, single_chain
from tests.models import dense, problem, squared

SCHEDULE = pp.one_f_one_b(2, 4)
PARAMS, INPUTS, TARGETS = problem(SCHEDULE)
STEP = pp.value_and_grad([dense] * 2, squared, SCHEDULE)
EVALUATOR = pp.evaluate([dense] * 2, squared, SCHEDULE)
LOWERED = STEP.lower(PARAMS, INPUTS, TARGETS)
MODEL = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
SPLIT = pp.split(MODEL, (INPUTS[:3],), at=["1"])
OPTIMIZER = pp.optim.adamw(1e-3)
TRAINER = pp.Trainer(SPLIT, squared, SCHEDULE, OPTIMIZER)
STATE = TRAINER.init(SPLIT.params)
TRAINING = TRAINER.lower(SPLIT.params, INPUTS, TARGETS)


def trainer(**options):
    return pp.Trainer(SPLIT, squared, SCHEDULE, OPTIMIZER, **options)


def made(stages=SPLIT, loss_fn=squared, schedule=SCHEDULE, **options):
    return pp.value_and_grad(stages, loss_fn, schedule, **options)


class Schedule1F1B:
    """As torch.distributed.pipelining names its own."""


class PipelineStage:
    """Likewise."""


class BatchEncoding(UserDict):
    """As transformers names what its tokenizers return."""


MISTAKES = {
    "parameters of a module": (lambda: TRAINER.init(MODEL), "such as split.params, split.state or"),
    "the name of a backend": (lambda: pp.P2P("nccl"), "none after init_process_group(backend)"),
    "inputs of another width": (
        lambda: pp.value_and_grad(SPLIT, squared, SCHEDULE)(SPLIT.params, INPUTS[:, :3], TARGETS),
        "give inputs of the form at the split",
    ),
    "torch.compile": (lambda: made(engine=torch.compile), "engine=ppfunc.engines.graph(compile=True)"),
    "layers that are modules": (
        lambda: pp.stages_from_layers(list(MODEL), pp.parallel.Partition((0, 2))), "pp.split(torch.nn.",
    ),
    "parameters in a list": (lambda: STEP([{}, {}], INPUTS, TARGETS), "such as split.params, split.state or"),
    "uneven rows": (lambda: STEP(PARAMS, INPUTS[:5], TARGETS[:5]), "ppfunc.Microbatches([...])"),
    "no loss": (lambda: made(loss_fn=lambda y, t: None)(SPLIT.params, INPUTS, TARGETS), "labels are among"),
    "BatchEncoding": (lambda: pp.split(MODEL, BatchEncoding({"input": INPUTS})), "or {'input_ids': ids}"),
    "a state before its folder": (lambda: pp.checkpoint.save(STATE, "no"), "path first, save(folder, state"),
    "a trainer that is saved": (lambda: pp.checkpoint.save("no", TRAINER), "Trainer, expected a tensor"),
    "an engine": (lambda: pp.engines.grap, "module 'ppfunc.stage.engines' .*'grap'; did you mean 'graph'"),
    "a collective of torch": (lambda: pp.collectives.all_reduce, "'all_reduce'; did you mean 'psum'"),
    "no checkpoint": (lambda: pp.checkpoint.laod, "'laod'; did you mean 'load'"),
    "no strategy": (lambda: pp.testing.plan, "'plan'; it has costs, placements, programs, schedules"),
    "no list of names": (lambda: pp.transforms.vjp, "'vjp'; did you mean 'jvp'"),
    "a number in letters": (lambda: pp.onef1b, "did you mean 'one_f_one_b'"),
    "jax.grad": (lambda: pp.grad, "did you mean 'value_and_grad'"),
    "stages of a split": (lambda: pp.split(MODEL, INPUTS, stages=2), "did you mean 'at'?; it takes model"),
    "bf16": (lambda: trainer(bf16=True), "did you mean 'precision'"),
    "max_grad_norm": (lambda: trainer(max_grad_norm=1.0), "did you mean 'ppfunc.optim.clip_by_global_norm'"),
    "fit": (lambda: TRAINER.fit, "Trainer has no attribute 'fit'; did you mean 'step'"),
    "a method of no trainer": (lambda: TRAINER.predict, "'predict'; it has close, evaluate, init, lower, "),
    "a trainer that saves": (lambda: TRAINER.save, "did you mean 'ppfunc.checkpoint.save'"),
    "apply_updates": (lambda: OPTIMIZER.apply, "Optimizer has no attribute 'apply'; did you mean 'update'"),
    "a rank of memory": (lambda: LOWERED.memory_analysis(1), "2 were given; it takes no arguments"),
    "a picture of a schedule": (lambda: pp.gpipe(2, 2).draw, "did you mean 'ppfunc.schedule.to_svg'"),
    "num_microbatches": (lambda: pp.gpipe(2, 2).num_microbatches, "Schedule has .*'microbatches'"),
    "a parameter of a split": (lambda: SPLIT.parameters(), "Split has no .*; did you mean 'params'"),
    "a step that trains": (lambda: STEP.backward, "StepFunction has no attribute 'backward'; it has "),
    "a length of a timeline": (lambda: pp.simulate(pp.gpipe(2, 2)).length, "Timeline has no .*; it has "),
    "memory": (lambda: LOWERED.memory(), "LoweredFunction has no .*; did you mean 'memory_analysis'"),
    "a whole state": (lambda: pp.checkpoint.export("no", STATE), "TrainState, expected .*: state.params"),
    "a file to export": (lambda: pp.checkpoint.export("no", "a.b"), "got 'a.b' of type str; expected"),
    "a shape of stages": (lambda: pp.eval_shape([dense], PARAMS[0], INPUTS), "got .* list, expected a step"),
    "the loss first": (lambda: made(squared, [dense] * 2), "list, expected .*; the order is stages, loss_fn"),
    "a rank that lowers alone": (
        lambda: require_same_terms("seed (0, 0); run", "seed None; lowered, not run", 1, 0),
        "every rank must call the same functions in the same order, lower() too",
    ),
    "n_microbatches": (lambda: pp.gpipe(2, n_microbatches=4), "did you mean 'microbatches'?; it takes ranks"),
    "a rise": (lambda: pp.optim.warmup_cosine(1.0, warmup_steps=1, steps=2), "did you mean 'warmup'?"),
    "measure": (lambda: pp.measure(SPLIT), "it takes stages, params, example, loss_fn, targets"),
    "a shape without x": (lambda: pp.eval_shape(dense, PARAMS[0]), "got 1 arguments of a stage, expected"),
    "init": (lambda: TRAINER.init(), "it takes params, state"),
    "lower": (lambda: TRAINER.lower(), "it takes params, inputs, targets, state=, extras="),
    "target": (lambda: STEP(PARAMS, INPUTS, target=TARGETS), "did you mean 'targets'?; it takes params"),
    "a typo": (lambda: STEP(PARAMS, INPUTS, tragets=TARGETS), "did you mean 'targets'?"),
    "update without params": (lambda: OPTIMIZER.update({}, {}), "; it takes grads, state, params"),
    "three in a chain": (lambda: pp.optim.chain(1, 2, 3), "it takes clip, optimizer"),
    "torch's stage": (lambda: pp.stage_from_module(PipelineStage()), "a function is a stage by itself"),
    "torch's schedule": (lambda: made(schedule=Schedule1F1B()), "such as ppfunc.one_f_one_b(ranks=4"),
    "DataParallel": (lambda: pp.stage_from_module(nn.DataParallel(MODEL)), "DataParallel has wrapped"),
    "a class of modules": (lambda: pp.split(nn.Linear, (INPUTS,), at=2), "make one: Linear(...)"),
    "a class of losses": (lambda: made(loss_fn=nn.MSELoss), "make one: MSELoss()"),
    "torch's optimizer": (
        lambda: pp.Trainer(SPLIT, squared, SCHEDULE, torch.optim.AdamW(MODEL.parameters())),
        "make an optimizer, such as ppfunc.optim.adamw(1e-3)",
    ),
    "parameters of an optimizer": (lambda: pp.optim.adamw(MODEL.parameters(), 1e-3), "given no parameters"),
    "precision": (lambda: trainer(precision="bf16"), "ppfunc.Precision(compute=torch.bfloat16)"),
    "scale": (lambda: pp.Precision(scale=1024), "ppfunc.static_scale(1024.0)"),
    "scaler": (lambda: pp.Precision(scale=torch.amp.GradScaler("cpu")), "ppfunc.dynamic_scale()"),
    "momentum": (lambda: pp.optim.sgd(0.1, momentum=1.5), "momentum is 1.5, expected .* less than 1"),
    "warmup": (lambda: pp.optim.warmup_cosine(1.0, warmup=100, steps=10), "pass steps=110 for a fall of 10"),
    "an iterator": (lambda: STEP(PARAMS, iter([INPUTS])), "ppfunc.Microbatches.from_iterator("),
    "a loader": (
        lambda: STEP(PARAMS, torch.utils.data.DataLoader(INPUTS), TARGETS),
        "ppfunc.Microbatches.from_iterator(",
    ),
    "an iterator that has ended": (
        lambda: pp.Microbatches.from_iterator(iter([INPUTS]), 2), "got 1 microbatches, expected 2",
    ),
    "no iterator": (lambda: pp.Microbatches.from_iterator([INPUTS], 1), "make it once, before the steps"),
    "batches of an iterator": (lambda: TRAINER.steps(STATE, iter([])), "itertools.islice(iterator, steps)"),
    "gradients of integers": (
        lambda: made([lambda p, x: p["w"][x], dense], argnums=1)(PARAMS, torch.arange(8) % 4, TARGETS[:8]),
        "inputs: got int64[2] no grad and argnums=1, expected a floating leaf",
    ),
    "a target that changes": (
        lambda: made([dense] * 2, lambda y, t: squared(y, t.mul_(2)))(PARAMS, INPUTS, TARGETS),
        "it writes into its argument target",
    ),
    "aux of a transform": (
        lambda: pp.jvp([dense] * 2, lambda y, t: (y.sum(), y), SCHEDULE)(PARAMS, PARAMS, INPUTS, TARGETS),
        "return that alone, or take ppfunc.value_and_grad",
    ),
    "ranks of a schedule by its class": (lambda: pp.Schedule("mine", 4, 8), "missing.*'programs'; it takes"),
    "a schedule of a model": (lambda: pp.gpipe(SPLIT, 4), "go to pp.value_and_grad(stages, loss_fn"),
    "a loss alone": (lambda: pp.value_and_grad(squared), "'schedule'; it takes stages, loss_fn, schedule"),
    "a batch alone": (lambda: TRAINER.step(INPUTS), "'inputs'; it takes state, inputs, targets"),
    "a folder alone": (lambda: pp.checkpoint.load("no"), "missing.*'like'; it takes folder, like"),
    "numbers of modules": (lambda: pp.split(MODEL, (INPUTS,), at=[1]), "the name of a module, such as '1'"),
    "modules": (lambda: pp.split(MODEL, (INPUTS,), at=[MODEL[1]]), "the name of a module, such as '1'"),
    "a name of a loss": (lambda: made(loss_fn="mse"), "such as torch.nn.functional.mse_loss"),
    "layers": (lambda: pp.split([nn.Linear(4, 4)], (INPUTS,), at=1), "torch.nn.Sequential(*layers)"),
    "a name of a model": (lambda: pp.split("gpt2", (INPUTS,), at=1), "AutoModelForCausalLM.from_pretrained"),
    "a name alone": (lambda: pp.split(MODEL, (INPUTS,), at="1"), "['1'] if it is one, or a number of stages"),
    "cuts in a dictionary": (lambda: pp.split(MODEL, (INPUTS,), at={"1": 0}), "such as ['1'], a number of"),
    "a list of arguments": (lambda: pp.split(MODEL, [INPUTS], at=["1"]), "several arguments are a tuple"),
    "a pair as the batch": (lambda: TRAINER.step(STATE, (INPUTS, TARGETS)), "as the argument after inputs"),
    "a state alone": (lambda: pp.checkpoint.save(STATE), "'state'; it takes folder, state"),
    "a split that is called": (lambda: SPLIT(INPUTS), "pp.evaluate(split, None, schedule, return_outputs"),
    "a split that is saved": (lambda: pickle.dumps(SPLIT), "split the model in each process"),
    "a trainer that is pickled": (lambda: pickle.dumps(TRAINER), "make a trainer in each process"),
    "a trainer that is copied": (lambda: deepcopy(TRAINER), "save its state by ppfunc.checkpoint.save"),
    "a paper without a mesh": (lambda: pp.OnPaper(), "missing.*'mesh'; it takes mesh=, axes=, shard="),
    "a number by its place": (lambda: pp.with_parts(SCHEDULE, 2), "it takes schedule, ranks=, lead="),
    "an argument of a function of none": (lambda: pp.two_streams(dense), "was given; it takes no arguments"),
    "axes of a topology": (lambda: pp.parallel.Topology(pipe=2), "Topology() got.*it takes axes, sizes"),
    "one stage of an ensemble": (lambda: pp.ensemble(dense, squared), "a list of functions, one per stage"),
    "a number before its batch": (lambda: pp.microbatch(8, INPUTS), "pass microbatches=1 or more$"),
    "one profile": (lambda: pp.schedule.to_trace(SCHEDULE, profiles="{}"), "expected a list of profiles"),
    "a step that is copied": (lambda: deepcopy(STEP), "a step function cannot be copied.*in each process"),
    "a step that is saved": (lambda: torch.save(STEP, io.BytesIO()), "save the parameters by"),
    "an evaluator that is sent": (lambda: pickle.dumps(partial(EVALUATOR, PARAMS)), "in each process"),
    "a lowered step that is pickled": (lambda: pickle.dumps(LOWERED), "a lowered or compiled step cannot be"),
    "a compiled step that is copied": (lambda: deepcopy(LOWERED.compile()), "keep its as_text()"),
    "a lowered training step": (lambda: deepcopy(TRAINING), "in each process"),
    "too few programs": (
        lambda: check(single_chain("mine", [0, 1], 1, [[F(0, 0)]])), "give a program for each rank",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_by_what_to_write(mistake):
    call, told = MISTAKES[mistake]
    pattern = ".*".join(map(re.escape, told.removesuffix("$").split(".*"))) + "$" * told.endswith("$")
    with pytest.raises((AttributeError, TypeError, ValueError, RuntimeError), match=pattern):
        call()


def test_schedules_and_states_are_copied_and_pickled():
    assert deepcopy(SCHEDULE) == SCHEDULE == pickle.loads(pickle.dumps(SCHEDULE))
    assert pickle.loads(pickle.dumps(STATE)).step == STATE.step


def test_an_error_within_a_function_stays_as_it_is():
    def loss_fn(y, target):
        return squared(y, target, 1)

    with pytest.raises(pp.StageError, match="called as loss"):
        made([dense] * 2, loss_fn)(PARAMS, INPUTS, TARGETS)
    with pytest.raises(TypeError) as caught:
        pp.optim.adamw(1e-3, mask=3)
    assert "it takes" not in str(caught.value)


def test_microbatches_of_a_loader_train():
    rows = list(zip(INPUTS, TARGETS, strict=True))
    loader = iter(torch.utils.data.DataLoader(rows, batch_size=3))
    inputs, targets = pp.Microbatches.from_iterator(loader, 4).unzip()
    assert torch.equal(STEP(PARAMS, inputs, targets)[0], STEP(PARAMS, INPUTS, TARGETS)[0])
    with pytest.raises(ValueError, match="got 0 microbatches"):
        pp.Microbatches.from_iterator(loader, 4)


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        ("from ppfunc import Trainr", "module 'ppfunc' has no attribute 'Trainr'; did you mean 'Trainer'"),
        ("from ppfunc.stage.engines import grap", "'grap'; did you mean 'graph'"),
        ("from ppfunc import PipelineTrainer", "did you mean 'ppfunc.integrations.transformers'"),
        ("from ppfunc.integrations import pipeline", "dir.ppfunc.integrations. lists its names"),
    ],
)
def test_an_import_of_an_unknown_name_is_answered_as_the_attribute(line, pattern):
    with pytest.raises(ImportError, match=pattern):
        exec(line)
    exec("from ppfunc import measurement")  # a module without a name at the door is imported as ever


def test_a_property_that_raises_is_no_unknown_name():
    @naming_attributes
    class Thing:
        @property
        def broken(self):
            return [].missing

    with pytest.raises(AttributeError, match="^'list' object has no attribute 'missing'$"):
        Thing().broken  # noqa: B018
    assert not hasattr(Thing(), "__deepcopy__") and deepcopy(Thing())


@pytest.mark.parametrize(
    ("name", "call"),
    {
        "has_aux": lambda wrong: made(has_aux=wrong),
        "return_outputs": lambda wrong: pp.evaluate(SPLIT, squared, SCHEDULE, return_outputs=wrong),
        "return_norms": lambda wrong: TRAINER.step(STATE, INPUTS, TARGETS, return_norms=wrong),
        "return_losses": lambda wrong: TRAINER.record(STATE, INPUTS, TARGETS, return_losses=wrong),
        "return_carry": lambda wrong: TRAINER.steps(STATE, [(INPUTS, TARGETS)], return_carry=wrong),
        "donate": lambda wrong: pp.optim.adamw(1e-3, donate=wrong),
        "mapped": lambda wrong: pp.P2P(mapped=wrong),
        "seconds": lambda wrong: pp.Costs(seconds=wrong),
        "step": lambda wrong: pp.schedule.append_tail(SCHEDULE, step=wrong),
    }.items(),
)
@pytest.mark.parametrize("wrong", ["yes", 1, None])
def test_what_is_neither_true_nor_false_is_refused_by_name(name, call, wrong):
    with pytest.raises(TypeError, match=rf"^{name}: got {wrong!r} of type \w+, expected True or False$"):
        call(wrong)


@pytest.mark.parametrize("engine", [pp.engines.graph, pp.engines.functional, pp.engines.eager])
def test_a_stage_that_counts_is_refused_in_words_that_hold_for_its_engine(engine):
    calls = [0]

    def counting(params, x):
        calls[0] += 1
        return dense(params, x)

    step = made([counting, dense], engine=engine)
    with pytest.raises(
        pp.StageError, match=r"it changes calls\[0\] from 0, and calls of a pure function leave"
    ):
        step(PARAMS, INPUTS, TARGETS)
