"""Names, arguments and objects of other libraries are answered by what to write here."""

from __future__ import annotations

import io
import pickle
import re
import subprocess
import sys
from collections import UserDict
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn

import ppfunc as pp
from ppfunc._old_words import OLD_WORDS
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
TIMELINE = pp.simulate(SCHEDULE)
OWNERS = [SCHEDULE, SPLIT, STEP, TRAINER, STATE, OPTIMIZER, TIMELINE]


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
    "Schedule.step": (lambda: SCHEDULE.step(INPUTS), "pp.value_and_grad(split, loss_fn, schedule)"),
    "Schedule.eval": (lambda: SCHEDULE.eval(INPUTS), "pp.evaluate(split, loss_fn, schedule)"),
    "ScheduleGPipe": (lambda: pp.ScheduleGPipe, "pp.gpipe(ranks, microbatches)"),
    "PipelineModule": (lambda: pp.PipelineModule, "pp.split(model, args, at="),
    "initialize": (lambda: pp.initialize, "pp.Trainer(split, loss_fn, schedule"),
    "pipeline": (lambda: pp.pipeline(MODEL, (INPUTS,)), "pp.split(model, args, at="),
    "get_schedule_class": (lambda: pp.get_schedule_class("1F1B"), "pp.schedule.find_builder(name)"),
    "a partition by weights": (lambda: pp.parallel.partition_by_weights([1], 1), "partition_balanced("),
    "a partition at the front door": (lambda: pp.partition_uniform(4, 2), "it is ppfunc.parallel.partition"),
    "train_step": (lambda: pp.train_step, "pp.Trainer(split, loss_fn, schedule, optimizer"),
    "remat": (lambda: pp.remat, 'engine=pp.engines.graph(remat="full")'),
    "scan": (lambda: pp.scan, "a loop in a stage is Python's"),
    "zero_bubble_h1": (lambda: pp.zero_bubble_h1(2, 4), "pp.zb_h1(ranks, microbatches)"),
    "Schedule.bubble": (lambda: SCHEDULE.bubble, "pp.simulate(schedule) has it"),
    "Schedule.to_svg": (lambda: SCHEDULE.to_svg(), "pp.schedule.to_svg(schedule)"),
    "input_ids": (lambda: pp.split(MODEL, input_ids=INPUTS, at=2), "a dictionary of the model's arguments"),
    "parameters of a module": (lambda: TRAINER.init(MODEL), "process runs; split.params and"),
    "the name of a backend": (lambda: pp.P2P("nccl"), "none after init_process_group(backend)"),
    "inputs of another width": (
        lambda: pp.value_and_grad(SPLIT, squared, SCHEDULE)(SPLIT.params, INPUTS[:, :3], TARGETS),
        "call the model itself on inputs of this form",
    ),
    "pmap": (lambda: pp.pmap, "pp.P2P(group)"),
    "optim.Adam": (lambda: pp.optim.Adam, "pp.optim.adamw(lr, weight_decay=0.0)"),
    "Split.to": (lambda: SPLIT.to("cuda"), "optree.tree_map(lambda t: t.to(device), split.params)"),
    "Split.parameters": (lambda: SPLIT.parameters(), "split.params"),
    "torch.compile": (lambda: made(engine=torch.compile), "engine=ppfunc.engines.graph(compile=True)"),
    "layers that are modules": (
        lambda: pp.stages_from_layers(list(MODEL), pp.parallel.Partition((0, 2))), "pp.split(torch.nn.",
    ),
    "Split.num_stages": (lambda: SPLIT.num_stages, "len(split.stages)"),
    "Split.generate": (lambda: SPLIT.generate(INPUTS), "state=state.stage_state), then generate"),
    "StepFunction.register_custom_function": (
        lambda: STEP.register_custom_function(None, None), "overlapped=function",
    ),
    "StepFunction.trace": (lambda: STEP.trace(INPUTS), "step.lower(params"),
    "Trainer.train_batch": (lambda: TRAINER.train_batch(), "trainer.step(state, inputs, targets)"),
    "Trainer.parameters": (lambda: TRAINER.parameters(), "state.params"),
    "Trainer.save_checkpoint": (lambda: TRAINER.save_checkpoint("x"), "pp.checkpoint.save(folder, state)"),
    "Trainer.module": (lambda: TRAINER.module, "split.put_back(state.params, state=state.stage_state)"),
    "TrainState.state": (lambda: STATE.state, "here: state.stage_state"),
    "TrainState.apply_gradients": (lambda: STATE.apply_gradients({}), "state._replace"),
    "Optimizer.step": (lambda: OPTIMIZER.step(), "optimizer.update(grads, state, params)"),
    "Metrics.item": (lambda: TRAINER.step(STATE, INPUTS, TARGETS)[1].item(), "metrics.loss"),
    "metrics as a dictionary": (lambda: TRAINER.step(STATE, INPUTS, TARGETS)[1]["loss"], "write .loss"),
    "a state that is assigned": (lambda: setattr(STATE, "params", {}), "._replace(params=...)"),
    "parameters in a list": (lambda: STEP([{}, {}], INPUTS, TARGETS), "such as split.params or state.params"),
    "microbatches of a step": (lambda: made(n_microbatches=4), "write ranks and microbatches where"),
    "rate of a trainer": (lambda: trainer(learning_rate=1e-3), "where it is made, pp.optim.adamw(lr)"),
    "loss of a schedule": (lambda: pp.gpipe(2, 4, loss_fn=squared), "write step = pp.value_and_grad("),
    "dw_builder": (lambda: pp.stage_from_module(MODEL, dw_builder=1), "W of a schedule computes them"),
    "uneven rows": (lambda: STEP(PARAMS, INPUTS[:5], TARGETS[:5]), "ppfunc.Microbatches([...])"),
    "no loss": (lambda: made(loss_fn=lambda y, t: None)(SPLIT.params, INPUTS, TARGETS), "labels are among"),
    "BatchEncoding": (lambda: pp.split(MODEL, BatchEncoding({"input": INPUTS})), "take dict(it)"),
    "a state before its folder": (lambda: pp.checkpoint.save(STATE, "no"), "path first, save(folder, state"),
    "a trainer that is saved": (lambda: pp.checkpoint.save("no", TRAINER), "take the state that its init"),
    "n_microbatches": (lambda: pp.gpipe(2, n_microbatches=4), "write microbatches; it takes ranks, micro"),
    "virtual stages": (lambda: pp.looped_bfs(2, 4, virtual_stages=2), "write chunks"),
    "chunks of gpipe": (lambda: pp.gpipe(2, 4, chunks=2), "write chunks of a schedule that has them"),
    "stages of a split": (lambda: pp.split(MODEL, (INPUTS,), num_stages=2), "write at=4 for as many stages"),
    "mode of a split": (lambda: SPLIT.eval(), "model.eval() of the model that was split act on its splits"),
    "optax's moments": (lambda: pp.optim.adamw(1e-3, b1=0.9), "write betas; it takes lr, betas"),
    "optax's rise": (lambda: pp.optim.warmup_cosine(1.0, warmup_steps=1, steps=2), "write warmup; it takes"),
    "measure": (lambda: pp.measure(SPLIT), "it takes stages, params, example, loss_fn, targets"),
    "init": (lambda: TRAINER.init(), "it takes params, state"),
    "lower": (lambda: TRAINER.lower(), "it takes params, inputs, targets, state, extras"),
    "target": (lambda: STEP(PARAMS, INPUTS, target=TARGETS), "write targets; it takes params, inputs"),
    "losses": (lambda: STEP(PARAMS, INPUTS, TARGETS, losses=[]), "write return_losses=True"),
    "split_spec": (lambda: pp.split(MODEL, (INPUTS,), split_spec={}), "write at=[names of modules]"),
    "learning_rate": (lambda: pp.optim.adamw(learning_rate=1e-3), "write lr; it takes lr, betas"),
    "has_aux of a trainer": (lambda: trainer(has_aux=True), "find aux in metrics.aux"),
    "max_grad_norm": (lambda: trainer(max_grad_norm=1.0), "write optimizer=pp.optim.chain("),
    "model": (lambda: made(model=MODEL), "write stages; pp.split("),
    "a typo": (lambda: STEP(PARAMS, INPUTS, tragets=TARGETS), "did you mean 'targets'?"),
    "update without params": (lambda: OPTIMIZER.update({}, {}), "; it takes grads, state, params"),
    "three in a chain": (lambda: pp.optim.chain(1, 2, 3), "it takes clip, optimizer"),
    "torch's stage": (lambda: pp.stage_from_module(PipelineStage()), "take its .submod"),
    "torch's stages": (lambda: made([PipelineStage()], schedule=pp.gpipe(1, 2)), "take its .submod"),
    "torch's schedule": (lambda: made(schedule=Schedule1F1B()), "pp.one_f_one_b(ranks, microbatches)"),
    "DataParallel": (lambda: pp.stage_from_module(nn.DataParallel(MODEL)), "take its .module"),
    "a class of modules": (lambda: pp.split(nn.Linear, (INPUTS,), at=2), "make one: Linear(...)"),
    "a class of losses": (lambda: made(loss_fn=nn.MSELoss), "make one: MSELoss()"),
    "torch's optimizer": (
        lambda: pp.Trainer(SPLIT, squared, SCHEDULE, torch.optim.AdamW(MODEL.parameters())),
        "pp.optim.adamw(lr) makes one",
    ),
    "parameters of an optimizer": (lambda: pp.optim.adamw(MODEL.parameters(), 1e-3), "given no parameters"),
    "precision": (lambda: trainer(precision="bf16"), "ppfunc.Precision(compute=torch.bfloat16)"),
    "scale": (lambda: pp.Precision(scale=1024), "ppfunc.static_scale(1024.0)"),
    "scaler": (lambda: pp.Precision(scale=torch.amp.GradScaler("cpu")), "pp.dynamic_scale()"),
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
    "a module that is called": (lambda: pp.checkpoint(dense), 'graph(remat="full")'),
    "another that is called": (lambda: pp.schedule("1f1b"), "pp.one_f_one_b(ranks, microbatches) makes"),
    "one without an answer": (lambda: pp.collectives(1), "dir(ppfunc.stage.collectives) lists its names"),
    "a backend of a transport": (lambda: pp.P2P(backend="nccl"), "init_process_group(backend) of torch"),
    "ranks of a schedule by its class": (lambda: pp.Schedule("mine", 4, 8), "pp.gpipe(ranks, microbatches)"),
    "a schedule of a model": (lambda: pp.gpipe(SPLIT, 4), "go to pp.value_and_grad(stages, loss_fn"),
    "a timeline that is saved": (lambda: TIMELINE.save("x"), "pp.schedule.to_trace(schedule, timeline)"),
    "a loss alone": (lambda: pp.value_and_grad(squared), "the stages first: (split, loss_fn, pp"),
    "a batch alone": (lambda: TRAINER.step(INPUTS), "then the batch, (state, inputs, targets)"),
    "a folder alone": (lambda: pp.checkpoint.load("no"), "write like=state, a state of the same form"),
    "numbers of modules": (lambda: pp.split(MODEL, (INPUTS,), at=[1]), "the name of a module, such as '1'"),
    "modules": (lambda: pp.split(MODEL, (INPUTS,), at=[MODEL[1]]), "the name of a module, such as '1'"),
    "retain_graph": (lambda: STEP(PARAMS, INPUTS, TARGETS, retain_graph=True), "no tensor has a .grad"),
    "callbacks": (lambda: trainer(callbacks=[]), "write a loop of your own round state, metrics ="),
    "parallel_state": (lambda: pp.parallel_state, "pp.P2P(group)"),
    "clip_grad_norm_": (lambda: pp.clip_grad_norm_({}, 1.0), "pp.optim.clip_by_global_norm(1.0)"),
    "clip_grad_norm_ of a trainer": (lambda: TRAINER.clip_grad_norm_(1.0), "clip_by_global_norm(1.0)"),
    "static_argnums": (lambda: made(static_argnums=0), "write nothing: numbers, texts and flags"),
    "a mesh by sizes": (lambda: pp.P2P(tensor_model_parallel_size=2), "pp.P2P(mesh=mesh, axes=axes)"),
    "a name of a loss": (lambda: made(loss_fn="mse"), "such as torch.nn.functional.mse_loss"),
    "layers": (lambda: pp.split([nn.Linear(4, 4)], (INPUTS,), at=1), "torch.nn.Sequential(*layers)"),
    "a name of a model": (lambda: pp.split("gpt2", (INPUTS,), at=1), "AutoModelForCausalLM.from_pretrained"),
    "a name alone": (lambda: pp.split(MODEL, (INPUTS,), at="1"), "['1'] if it is one, or a number of stages"),
    "cuts in a dictionary": (lambda: pp.split(MODEL, (INPUTS,), at={"1": 0}), "such as ['1'], a number of"),
    "a list of arguments": (lambda: pp.split(MODEL, [INPUTS], at=["1"]), "several arguments are a tuple"),
    "a pair as the batch": (lambda: TRAINER.step(STATE, (INPUTS, TARGETS)), "as the argument after inputs"),
    "a state alone": (lambda: pp.checkpoint.save(STATE), "save(folder, state); it takes folder, state"),
    "a split that is called": (lambda: SPLIT(INPUTS), "pp.evaluate(split, None, schedule, return_outputs"),
    "a split that is saved": (lambda: pickle.dumps(SPLIT), "split the model in each process"),
    "a trainer that is pickled": (lambda: pickle.dumps(TRAINER), "make a trainer in each process"),
    "a trainer that is copied": (lambda: deepcopy(TRAINER), "save its state by ppfunc.checkpoint.save"),
    "a paper without a mesh": (lambda: pp.OnPaper(), "missing.*'mesh'; it takes mesh, axes, shard"),
    "a step that is copied": (lambda: deepcopy(STEP), "a step function is not copied.*in each process"),
    "a step that is saved": (lambda: torch.save(STEP, io.BytesIO()), "save the parameters by"),
    "an evaluator that is sent": (lambda: pickle.dumps(partial(EVALUATOR, PARAMS)), "in each process"),
    "a lowered step that is pickled": (lambda: pickle.dumps(LOWERED), "a lowered or compiled step is not"),
    "a compiled step that is copied": (lambda: deepcopy(LOWERED.compile()), "keep its as_text()"),
    "a lowered training step": (lambda: deepcopy(TRAINING), "in each process"),
    "too few programs": (
        lambda: check(single_chain("mine", [0, 1], 1, [[F(0, 0)]])), "give a program for each rank",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_by_what_to_write(mistake):
    call, told = MISTAKES[mistake]
    pattern = ".*".join(map(re.escape, told.split(".*")))
    with pytest.raises((AttributeError, TypeError, ValueError, RuntimeError), match=pattern):
        call()


@pytest.mark.parametrize("first", ["pp.gpipe", "import ppfunc.schedule"])
def test_a_package_that_is_called_answers_whatever_was_imported_before(first):
    code = f"import ppfunc as pp; {first}; pp.schedule('1f1b')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "here: pp.one_f_one_b(ranks, microbatches) makes one" in done.stderr


@pytest.mark.parametrize("owner", OWNERS, ids=lambda owner: type(owner).__name__)
def test_only_names_that_are_unknown_are_old(owner):
    words = OLD_WORDS[type(owner).__name__]
    assert not [name for name in words if name in dir(type(owner))]
    assert not hasattr(owner, "_repr_png_")
    told = f"^'{type(owner).__name__}' object has no attribute 'xyz'; it has "
    with pytest.raises(AttributeError, match=told) as error:
        owner.xyz  # noqa: B018
    names = re.sub(told, "", str(error.value)).split(", ")
    assert names and all(hasattr(owner, name) for name in names)


def test_names_of_the_package_are_no_old_ones():
    assert not set(OLD_WORDS["ppfunc"]) & {*dir(pp), *dir(pp.optim)}


def test_values_that_answer_are_copied_and_pickled():
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
