"""Training steps given odd things: right, or refused by name, on every rank."""

from __future__ import annotations

import gc
import math
import signal
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import ppfunc as pp
from ppfunc.stage.tree import tree_leaves, tree_map
from tests import models
from tests.models import BatchNormed, dense, new_trainer, normal, same_bits, squared
from tests.sharded_models import full
from tests.training.world import Reads

WIDTH, ROWS = 4, 16
CLIPPING = pp.optim.chain(pp.optim.clip_by_global_norm(0.1), pp.optim.adamw(1e-2))


def problem(stages=2):
    return [dense] * stages, *models.problem(stages, b=ROWS // 4, d=WIDTH)


def trainer_of(optimizer=None, stages=None, schedule=None, loss=squared, **options):
    return new_trainer(
        stages or [dense] * 2,
        loss,
        schedule or pp.one_f_one_b(2, 4),
        optimizer or pp.optim.adamw(1e-2),
        **options,
    )


# -- arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, error, text",
    [
        (
            {"on_nonfinite": "rise"},
            ValueError,
            "on_nonfinite: got 'rise', expected 'skip' or 'raise' or 'ignore'; did you mean 'raise'",
        ),
        ({"on_nonfinite": True}, ValueError, "on_nonfinite: got True"),
        (
            {"scale": 1024.0},
            TypeError,
            "scale: got 1024.0 of type float.* write ppfunc.static_scale",
        ),
        ({"precision": torch.bfloat16}, TypeError, "precision: got torch.bfloat16 .*, expected Precision"),
        ({"precision": {}}, TypeError, "precision: got {} of type dict, expected Precision"),
        (
            {"scale": pp.dynamic_scale(), "on_nonfinite": "raise"},
            ValueError,
            "got 'raise' with the scale dynamic_scale.*; take 'skip'",
        ),
        (
            {"scale": pp.dynamic_scale(), "on_nonfinite": "ignore"},
            ValueError,
            "got 'ignore' with the scale dynamic_scale",
        ),
        ({"mesh": "x"}, TypeError, "mesh: got 'x' of type str, expected a DeviceMesh"),
        ({"axes": "dp"}, TypeError, "axes: got 'dp' of type str, expected ppfunc.Axes"),
        ({"axes": pp.Axes("pp")}, ValueError, "axes: got .*, and no mesh that has them; give mesh= as well"),
        ({"transport": "gloo"}, TypeError, "transport: got 'gloo' of type str"),
        (
            {"optimizer": torch.optim.Adam},
            TypeError,
            "optimizer: got .*, expected init and update; make an optimizer, such as ppfunc.optim.adamw",
        ),
        ({"optimizer": 1e-3}, TypeError, "optimizer: got 0.001"),
        ({"tied": {"w": [(0, "w"), (7, "w")]}}, ValueError, "a stage that does not exist; the stages are"),
        ({"schedule": pp.one_f_one_b(3, 4)}, ValueError, "stages: got 2, the schedule '.*' has 3"),
        ({"schedule": pp.schedule.forward_only(pp.gpipe(2, 4))}, Exception, "backward"),
    ],
    ids=str,
)
def test_arguments_of_a_trainer_are_named(options, error, text):
    with pytest.raises(error, match=text):
        trainer_of(**options)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"shard": "optimiser"}, "expected 'none' or 'optimizer' or 'params'; did you mean 'optimizer'"),
        ({"shard": None}, "shard: got None"),
        ({"shard": "params"}, "shard: got 'params', and no axis of data ranks to cut over"),
    ],
    ids=str,
)
def test_a_wrong_shard_of_a_transport_is_named(options, text):
    with pytest.raises(ValueError, match=text):
        pp.P2P(**options)


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda: pp.optim.adamw(-1), ValueError, "lr is -1, expected a finite number of at least 0"),
        (lambda: pp.optim.adamw(math.nan), ValueError, "lr is nan"),
        (lambda: pp.optim.adamw(lambda n: "0.1"), TypeError, r"lr\(0\): got '0.1' of type str"),
        (lambda: pp.optim.adamw(lambda n: torch.ones(2)), TypeError, r"lr\(0\): got .*, or a tensor of one"),
        (lambda: pp.optim.adamw(math.inf), ValueError, "lr is inf"),
        (
            lambda: pp.optim.adamw("1e-3"),
            TypeError,
            "lr is '1e-3' of type str, expected a number, or a function of the number of updates",
        ),
        (lambda: pp.optim.adamw(None), TypeError, "lr is None"),
        (lambda: pp.optim.adamw(True), TypeError, "lr is True"),
        (
            lambda: pp.optim.adamw(1e-3, (0.9, 1.0)),
            ValueError,
            r"betas\[1\] is 1.0, expected a number of at least 0 and less than 1",
        ),
        (lambda: pp.optim.adamw(1e-3, (-0.1, 0.9)), ValueError, r"betas\[0\] is -0.1"),
        (lambda: pp.optim.adamw(1e-3, (0.9, math.nan)), ValueError, r"betas\[1\] is nan"),
        (lambda: pp.optim.adamw(1e-3, 0.9), TypeError, "betas is 0.9, expected two numbers"),
        (lambda: pp.optim.adamw(1e-3, eps=-1e-8), ValueError, "eps is -1e-08"),
        (lambda: pp.optim.adamw(1e-3, weight_decay=-0.1), ValueError, "weight_decay is -0.1"),
        (lambda: pp.optim.sgd(-0.1), ValueError, "lr is -0.1"),
        (lambda: pp.optim.adamw(lambda n: -0.1), ValueError, r"lr\(0\) is -"),
        (lambda: pp.optim.adamw(lambda n: torch.log(n.double())), ValueError, r"lr\(0\) is -inf"),
        (lambda: pp.optim.adamw(lambda n: n / 0.0 * 0), ValueError, r"lr\(0\) is nan"),
        (lambda: pp.optim.sgd(0.1, nesterov=True), ValueError, "got momentum=0; pass nesterov=False"),
        (
            lambda: pp.optim.chain(pp.optim.clip_by_global_norm(1.0), CLIPPING),
            ValueError,
            "optimizer: got chain.*, which clips already",
        ),
        (lambda: pp.optim.sgd(0.1, -0.9), ValueError, "momentum is -0.9"),
        (lambda: pp.optim.sgd(0.1, weight_decay=math.inf), ValueError, "weight_decay is inf"),
        (lambda: pp.optim.linear(0.1, math.nan, 4), ValueError, "end is nan"),
        (
            lambda: pp.optim.linear(0.1, 0.0, 2.5),
            ValueError,
            "steps = 2.5, expected an integer of at least 1",
        ),
        (lambda: pp.optim.warmup_cosine(-0.1, 2, 4), ValueError, "peak is -0.1"),
        (lambda: pp.static_scale("2"), TypeError, "scale is '2'"),
        (lambda: pp.optim.clip_by_global_norm(math.nan), ValueError, "max_norm is nan"),
        (lambda: pp.optim.clip_by_global_norm(-1.0), ValueError, "max_norm is -1.0, expected a norm"),
        (lambda: pp.optim.clip_by_global_norm(True), TypeError, "max_norm is True"),
        (lambda: pp.optim.clip_by_global_norm(1.0, "inf"), TypeError, "norm_type is 'inf'.*such as math.inf"),
        (lambda: pp.optim.clip_by_global_norm(1.0, math.nan), ValueError, "norm_type is nan"),
        (
            lambda: pp.optim.clip_by_global_norm(1.0, 0),
            ValueError,
            "norm_type is 0, expected a number of mor",
        ),
    ],
)
def test_numbers_out_of_range_are_named(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_parameters_that_are_none_are_named():
    _, params, *_ = problem()
    trainer = trainer_of()
    for given, error, text in (
        (
            None,
            TypeError,
            r"params: got None of type NoneType, expected a dictionary \{stage: tree\}, such as split.params",
        ),
        (params[0]["w"], TypeError, "params: got tensor"),
        ({0: params[0]}, ValueError, r"params: got the stages \[0\], this process runs \[0, 1\]"),
        ({**params, 7: params[0]}, ValueError, r"params: got the stages \[0, 1, 7\]"),
        (
            {0: params[0], 1: {"w": 1.0}},
            TypeError,
            r"params\[1\]\['w'\]: got 1.0 of type float, expected a tensor",
        ),
    ):
        with pytest.raises(error, match=text):
            trainer.init(given)
    with pytest.raises(
        ValueError, match=r"state: got the stages \[5\], this process runs \[0, 1\]; give some of those"
    ):
        trainer.init(params, {5: params[0]})


class Running(NamedTuple):
    mean: torch.Tensor


KEPT = r"got nothing, expected torch.float64 of shape .*, which the optimizer adamw\(.* keeps; go on with"
STATES = {  # made of a state and its trainer's parameters, and what is told
    "stages": (
        lambda state, params: trainer_of(stages=[dense], schedule=pp.gpipe(1, 4)).init({0: params[0]}),
        r"state.params: got the stages \[0\], this process runs \[0, 1\]",
    ),
    "optimizer": (
        lambda state, params: trainer_of(pp.optim.sgd(1e-2)).init(params),
        rf"state.optimizer\[0\]\['mean'\]\['w'\]: {KEPT}",
    ),
    "moments": (
        lambda state, params: trainer_of(pp.optim.sgd(1e-2, 0.9)).init(params),
        rf"state.optimizer\[0\]\['mean'\]\['w'\]: {KEPT}",
    ),
    "chain": (
        lambda state, params: state._replace(optimizer={0: (), 1: ()}),
        r"state.optimizer\[0\]\['.*'\]: got nothing, expected .* optimizer adamw\(",
    ),
    "more": (
        lambda state, params: of_optimizer(state, more=torch.tensor(0)),
        r"state.optimizer\[0\]\['more'\]: got torch.int64 of shape \[\], expected nothing",
    ),
    "count": (
        lambda state, params: of_optimizer(state, updates=torch.tensor(0.0)),
        r"state.optimizer\[0\]\['updates'\]: got torch.float32 of shape \[\]",
    ),
    "cut": (
        lambda state, params: of_optimizer(state, mean={"w": normal(1, WIDTH)}),
        r"state.optimizer\[0\]\['mean'\]\['w'\]: got torch.float64 of shape \[1, 4\], expected torch",
    ),
    "missing": (
        lambda state, params: state._replace(optimizer={0: state.optimizer[0]}),
        r"state.optimizer: got the stages \[0\]",
    ),
    "scale": (
        lambda state, params: trainer_of(scale=pp.dynamic_scale()).init(params),
        "state.scale: got 'scale', 'good', the scale of this trainer has none",
    ),
    "no scale": (
        lambda state, params: state._replace(scale=None),
        "state.scale: got None, the scale of this trainer has none",
    ),
    "step": (lambda state, params: state._replace(step=3), "state.step: got 3, expected an int64 tensor"),
    "shape": (
        lambda state, params: state._replace(params={0: {"w": normal(WIDTH, 2)}, 1: params[1]}),
        r"\[4,2\]|4x2|must match|cannot|shape",
    ),
    "number": (
        lambda state, params: state._replace(params={0: {"w": 1.5}, 1: params[1]}),
        r"state.params\[0\]\['w'\]: got 1.5 of type float, expected a tensor",
    ),
    "stage state": (
        lambda state, params: state._replace(stage_state={0: Running(normal(1))}),
        "takes 2 positional arguments but 3 were given",
    ),
    "no stage state": (
        lambda state, params: state._replace(stage_state=None),
        "state.stage_state: got None of type NoneType, expected a dictionary",
    ),
    "parameters": (lambda state, params: params, "state: got an object of type dict, expected a TrainState"),
    "nothing": (lambda state, params: None, "state: got an object of type NoneType, expected a TrainState"),
    "tuple": (lambda state, params: tuple(state), "state: got an object of type tuple, expected a TrainS"),
    "pair": (lambda state, params: (state, None), "state: .*tuple, .*state, metrics = trainer.step"),
}


def of_optimizer(state, **changed):
    return state._replace(optimizer={**state.optimizer, 0: {**state.optimizer[0], **changed}})


@pytest.mark.parametrize("kind", STATES)
def test_states_of_others_are_named(kind):
    (make, text), (_, params, x, y) = STATES[kind], problem()
    trainer = trainer_of()
    state = trainer.init(params)
    other = make(state, params)
    for call in (trainer.step, trainer.evaluate):
        with pytest.raises((TypeError, ValueError, pp.PipelineError, pp.StageError), match=text):
            call(other, x, y)
    assert trainer.step(state, x, y)[0].step == 1


@pytest.mark.parametrize("place", ["init", "update"])
def test_what_a_handler_raises_while_an_optimizer_is_tried_is_raised(place):
    """It was taken for an error of the optimizer, of which some mean nothing, and training went on."""
    armed, plain = [True], pp.optim.sgd(0.1)

    def ended(number, frame):
        raise RuntimeError("terminated")

    def strike(called, leaf):
        if armed[0] and called == place and (leaf.is_meta or place == "update"):
            armed[0] = False
            signal.raise_signal(signal.SIGTERM)

    def init(params):
        strike("init", params["w"])
        return plain.init(params)

    def update(grads, state, params):
        strike("update", params["w"])
        return plain.update(grads, state, params)

    _, params, x, y = problem()
    trainer = trainer_of(pp.optim.Optimizer(init, update))
    before = signal.signal(signal.SIGTERM, ended)
    try:
        with pytest.raises(RuntimeError, match="terminated"):
            trainer.step(trainer.init(params), x, y)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not armed[0]


def test_an_optimizer_may_keep_other_trees_of_large_leaves():
    """The structure of a state was that of leaves of one element, and no state of its own was taken."""

    def init(params):
        return {n: {"row": p[:, 0] * 0} if p.numel() > 1 else {"all": p * 0} for n, p in params.items()}

    def update(grads, state, params):
        rows = {"row": lambda g: g.square().mean(1), "all": torch.square}
        new = {n: {k: v + rows[k](grads[n]) for k, v in kept.items()} for n, kept in state.items()}
        return {n: p - 0.1 * grads[n] for n, p in params.items()}, new

    _, params, x, y = problem()
    trainer = trainer_of(pp.optim.Optimizer(init, update))
    state, _ = trainer.step(trainer.init(params), x, y)
    after, _ = trainer.step(state, x, y)
    assert after.optimizer[0]["w"]["row"].shape == (WIDTH,)
    assert (after.optimizer[0]["w"]["row"] > state.optimizer[0]["w"]["row"]).all()


def test_a_mask_of_all_stages_is_told_before_anything_runs():
    """It was found by the first STEP."""
    stages, params, *_ = problem(2)
    every = lambda trees: {s: {name: p.ndim > 1 for name, p in tree.items()} for s, tree in trees.items()}  # noqa: E731
    called = (
        "mask: it raised AttributeError at .*test_refusals.py.*'items' of a parameter.*it is called with the"
        " parameters of one stage"
    )
    kinds = (
        "mask: got {0: True, 1: True}, expected booleans in the structure of the parameters of one stage,"
        " such as {'w': "
    )
    for mask, text in ((every, called), (lambda trees: {0: True, 1: True}, kinds)):
        with pytest.raises(ValueError, match=text):
            pp.Trainer(stages, squared, pp.gpipe(2, 2), pp.optim.adamw(0.1, mask=mask)).init(params)


@pytest.mark.parametrize("engine", [pp.engines.graph, pp.engines.functional, pp.engines.eager])
def test_a_wrong_dtype_is_told_with_the_line_of_the_stage(engine):
    def stage(p, x):
        return x @ p["w"]

    params, line = {0: {"w": normal(3, 3)}}, stage.__code__.co_firstlineno + 1
    step = pp.value_and_grad([stage], squared, pp.gpipe(1, 2), engine=engine)
    with pytest.raises(
        pp.PipelineError, match=f"float != double at .*test_refusals.py:{line}; its input was float32"
    ):
        step(params, normal(2, 3).float(), normal(2, 3))
    with pytest.raises(
        pp.StageError, match=f"test_refusals.py:{line}: .*given integers; convert them, as x.float"
    ):
        step(params, torch.ones(2, 3, dtype=torch.int64), normal(2, 3))


def test_batches_of_several_steps_are_pairs():
    _, params, x, y = problem()
    trainer = trainer_of()
    for given in (x, [x], [(x, y, x)], "xy", None):
        with pytest.raises(
            TypeError, match=r"batches: got .*, expected a list of \(inputs, targets\), one for every step"
        ):
            trainer.steps(trainer.init(params), given)
    with pytest.raises(ValueError, match="batches: got an empty list"):
        trainer.steps(trainer.init(params), [])
    for seed in (3, (1,), ("a", "b")):
        with pytest.raises(TypeError, match=r"seed: got .*, expected \(seed, step\), two integers"):
            trainer.steps(trainer.init(params), [(x, y)] * 2, seed=seed)


@pytest.mark.parametrize(
    "update, text",
    [
        (lambda g, s, p: p, "has returned .* for stage ., expected \\(parameters, state\\)"),
        (
            lambda g, s, p: (None, s),
            "has made the structure .* of the parameters of stage 0, expected .* as before; let its update",
        ),
        (
            lambda g, s, p: ({"w": 1.0}, s),
            r"has made 1.0 of the parameter torch.float64\[4, 4\] of stage ., parameter\['w'\]",
        ),
        (
            lambda g, s, p: ({"w": p["w"].float()}, s),
            r"has made torch.float32\[4, 4\] of the parameter torch.float64\[4, 4\]",
        ),
        (lambda g, s, p: ({"w": p["w"].sum(0)}, s), r"has made torch.float64\[4\] of the parameter"),
        (
            lambda g, s, p: (p, {"n": torch.zeros(2)}),
            r"has made torch.float32\[2\] of the state torch.float32\[\]",
        ),
        (lambda g, s, p: (p, {}), "has made the structure .* of the states of stage"),
    ],
)
@pytest.mark.parametrize("on_nonfinite", ["ignore", "raise", "skip"])
def test_results_of_an_optimizer_of_another_form_are_named(update, text, on_nonfinite):
    _, params, x, y = problem()
    optimizer = pp.optim.Optimizer(lambda params: {"n": torch.zeros(())}, update)
    trainer = trainer_of(optimizer, on_nonfinite=on_nonfinite)
    with pytest.raises(pp.PipelineError, match=text):
        trainer.step(trainer.init(params), x, y)


@pytest.mark.parametrize("momentum", [False, True])
def test_an_optimizer_that_returns_differences_is_refused(momentum):
    """As those of optax do: parameters were replaced by the last difference, without a word."""

    def update(grads, state, params):
        state = tree_map(lambda m, g: 0.9 * m + g, state, grads) if momentum else state
        return tree_map(lambda g: -0.1 * g, state if momentum else grads), state

    def zeros(params):
        return tree_map(torch.zeros_like, params)

    with pytest.raises(
        ValueError, match=r"params\[0\]: .* has made -?0 of .*becomes one by ppfunc.optim.from_up"
    ):
        trainer_of(pp.optim.Optimizer(zeros, update)).init(problem()[1])
    trainer = trainer_of(pp.optim.from_updates(pp.optim.Optimizer(zeros, update)))
    _, params, x, y = problem()
    before, after = params, trainer.step(trainer.init(params), x, y)[0].params
    assert all((after[s]["w"] - before[s]["w"]).abs().max() < 0.5 for s in before)


def test_the_state_of_an_optimizer_is_tensors():
    trainer = trainer_of(pp.optim.Optimizer(lambda params: {"n": 0}, lambda g, s, p: (p, s)))
    with pytest.raises(
        TypeError, match=r"optimizer.init\(params\[0\]\)\['n'\]: got 0 of type int, expected a tensor"
    ):
        trainer.init(problem()[1])


def test_a_state_of_other_nodes_is_named():
    _, params, x, y = problem()
    own = pp.optim.Optimizer(lambda params: (torch.zeros(()),), lambda grads, state, params: (params, state))
    trainer = trainer_of(own)
    state = trainer.init(params)
    with pytest.raises(
        ValueError, match=r"state.optimizer\[0\]: got the structure .*\[\*\].* expected .*\(\*,\)"
    ):
        trainer.step(state._replace(optimizer={s: [*own] for s, own in state.optimizer.items()}), x, y)


def test_an_optimizer_that_takes_any_keyword_skips_too():
    _, params, x, y = problem()

    def update(grads, state, params, **options):
        return tree_map(lambda p, g: p - 0.1 * g, params, grads), tree_map(lambda n: n + 1, state)

    trainer = trainer_of(pp.optim.Optimizer(lambda params: {"n": torch.zeros(())}, update))
    state = trainer.init(params)
    skipped, metrics = trainer.step(state, x / 0, y)
    assert metrics.skipped == 1
    assert same_bits((skipped.params, skipped.optimizer), (state.params, state.optimizer))
    after, _ = trainer.step(state, x, y)
    assert after.optimizer[0]["n"] == 1


# -- numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, pp.dynamic_scale(), pp.static_scale(8.0)])
@pytest.mark.parametrize("clip", [None, 0.0, math.inf, 0.5])
def test_an_overflow_on_the_first_step_changes_nothing(scale, clip):
    _, params, x, y = problem()
    trainer = trainer_of(pp.optim.sgd(0.1, 0.9), scale=scale, clip=clip)
    state = trainer.init(params)
    after, metrics = trainer.step(state, x * math.inf, y)
    assert metrics.skipped == 1
    assert same_bits((after.params, after.optimizer, after.step), (state.params, state.optimizer, state.step))
    after, metrics = trainer.step(after, x, y)
    assert metrics.skipped == 0
    assert same_bits(after.params, state.params) == (clip == 0.0)


def half_precision(weights, loss=lambda y, t: (y.float() * t).sum(), **options):
    params, x = {0: {"w": torch.ones(4)}}, torch.ones(4, 4)
    precision = pp.Precision(compute=torch.float16, reduce=torch.float32, master=torch.float32)
    trainer = trainer_of(
        pp.optim.sgd(1.0), [lambda p, x: x * p["w"]], pp.gpipe(1, 2), loss, precision=precision, **options
    )
    return trainer.step(trainer.init(params), x, torch.full((4, 4), 0.25), loss_weights=weights)


def test_many_tokens_do_not_overflow_half_precision():
    (state, metrics), (wanted, _) = half_precision([3e5, 1e5]), half_precision([0.75, 0.25])
    assert metrics.skipped == 0
    assert same_bits(state.params, wanted.params)
    few, metrics = half_precision([3e-9, 1e-9])
    assert metrics.grad_norm > 0
    assert same_bits(few.params, wanted.params)


def test_a_scaled_loss_in_half_precision_is_refused():
    with pytest.raises(
        ValueError,
        match=r"the loss of stage 0 is float16, in which a scaled loss overflows; compute it in float32",
    ):
        half_precision(None, lambda y, t: (y * t.half()).sum(), scale=pp.static_scale(2.0**16))


@pytest.mark.parametrize(
    "weights, text",
    [
        ([0.0] * 4, "loss_weights: their sum over all data ranks is 0"),
        ([1e308] * 4, "loss_weights: their sum over all data ranks is inf"),
        ([1.0, -1.0, 1.0, -1.0], r"loss_weights: got \[1.0, -1.0, .*, expected numbers of at least 0"),
        ([-1.0] * 4, "loss_weights: got .*, expected numbers of at least 0"),
        ([1.0, math.nan, 1.0, 1.0], "loss_weights: got .*, expected finite numbers"),
        ([1.0, math.inf, 1.0, 1.0], "loss_weights: got .*, expected finite numbers"),
        ([1.0] * 3, "loss_weights: got shape"),
        ("abcd", "loss_weights: got 'abcd'"),
    ],
)
def test_weights_that_cannot_be_shares_are_named(weights, text):
    _, params, x, y = problem()
    for on_nonfinite in ("skip", "ignore"):
        trainer = trainer_of(on_nonfinite=on_nonfinite)
        with pytest.raises((ValueError, TypeError), match=text):
            trainer.step(trainer.init(params), x, y, loss_weights=weights)


# -- tied places ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other, error, text",
    [
        (normal(WIDTH, 3), ValueError, "tied parameters have one shape and dtype"),
        (normal(WIDTH, WIDTH).float(), ValueError, "tied parameters have one shape and dtype"),
        (normal(WIDTH, WIDTH, seed=5), pp.AgreementError, "has other values in stage 0 than in stage 1"),
    ],
)
def test_tied_leaves_that_differ_are_named(other, error, text):
    _, params, x, y = problem()
    trainer = trainer_of(stages=[dense, lambda p, x: x + p["w"].sum()], tied={"w": [(0, "w"), (1, "w")]})
    with pytest.raises(error, match=text):
        trainer.step(trainer.init({0: params[0], 1: {"w": other}}), x, y)


def test_a_tied_leaf_that_is_not_named_so_is_refused():
    _, params, x, y = problem()
    trainer = trainer_of(tied={"w": [(0, "w"), (1, "weight")]})
    with pytest.raises(ValueError, match="has no leaf 'weight'; it has 'w'"):
        trainer.step(trainer.init({0: params[0], 1: {"w": params[0]["w"].clone()}}), x, y)


def test_frozen_leaves_may_be_tied():
    """Integers, of which there is no gradient."""
    ids = torch.arange(WIDTH)
    stages = [lambda p, x: torch.tanh(x @ p["w"]) + p["ids"], lambda p, x: x @ p["w"] * p["ids"]]
    _, params, x, y = problem()
    given = {s: {**params[s], "ids": ids.clone()} for s in (0, 1)}
    trainer = trainer_of(stages=stages, tied={"ids": [(0, "ids"), (1, "ids")]}, clip=0.5)
    state, metrics = trainer.step(trainer.init(given), x, y)
    plain, expected = trainer_of(stages=stages, clip=0.5).step(trainer.init(given), x, y)
    assert metrics.grad_norm == expected.grad_norm
    assert same_bits(state.params, plain.params)


# -- the first number that is not finite ----------------------------------------------------


def spoiled(at, kind):
    """A stage that makes no number of the microbatch whose first element is ``at``, forward or backward
    alone.
    """

    class Spoil(torch.autograd.Function):
        @staticmethod
        def forward(x, w):
            return x @ w

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            bad = torch.where(x[0, 0] == at, torch.full_like(x[0, 0], math.inf), torch.ones_like(x[0, 0]))
            return (g @ w.T) * (bad if kind == "I" else 1), (x.T @ g) * (bad if kind == "W" else 1)

    def stage(params, x):
        if kind == "F":
            return x @ params["w"] * torch.where(x[0, 0] == at, math.inf, 1.0)
        return Spoil.apply(x, params["w"])

    return stage


WHERE = {
    "F": (r"at 0F3, .*\(stage 0, microbatch 3\)", "its output"),
    "I": (r"at 0[BI]3, .*\(stage 0, microbatch 3\)", "the gradient of"),
    "W": (r"at 0[BW]3, .*\(stage 0, microbatch 3\)", "the gradient of its parameter 'w'"),
}


@pytest.mark.parametrize("build", [pp.one_f_one_b, pp.zb_h1])
@pytest.mark.parametrize("kind", ["F", "I", "W"])
@pytest.mark.parametrize("step", ["train", "gradients"])
def test_the_first_number_that_is_not_finite_is_named(kind, build, step):
    _, params, x, y = problem()
    x[12, 0] = 77.0
    place, what = WHERE[kind]
    stages, schedule = [spoiled(77.0, kind), dense], build(2, 4)
    if kind == "I":  # of the stage behind, so that there is a gradient of an input that somebody wants
        stages = [dense, spoiled(torch.tanh(x[12] @ params[0]["w"])[0].item(), kind)]
        place = place.replace("0[", "1[").replace("stage 0", "stage 1")
    text = rf"rank . failed {place}: FloatingPointError: the loss .*; first not finite: {what}"
    with pytest.raises(pp.PipelineError, match=text) as caught:
        if step == "train":
            trainer = trainer_of(
                stages=stages, schedule=schedule, on_nonfinite="raise", engine=pp.engines.functional, clip=1.0
            )
            trainer.step(trainer.init(params), x, y)
        else:
            pp.value_and_grad(stages, squared, schedule, engine=pp.engines.functional, on_nonfinite="raise")(
                params, x, y
            )
    assert caught.value.microbatch == 3


def test_the_pass_and_the_step_where_a_number_is_not_finite_are_found():
    """Of several steps of two passes each, in the third; with states of stages, whose values are those of
    that step.
    """
    _, params, x, y = problem()
    bad = x.clone()
    bad[12] = math.nan

    def counting(params, x, state):
        return pp.Output(dense(params, x), state=state + 1, metrics=state)

    trainer = trainer_of(stages=[counting, dense], schedule=pp.zb_h1(2, 4), on_nonfinite="raise")
    state = trainer.init(params, {0: torch.zeros(())})
    with pytest.raises(pp.PipelineError, match=r"at 0F3, .*: its output; already its input had such numbers"):
        trainer.steps(state, [(x, y), (x, y), (bad, y)])
    after, metrics = trainer.steps(state, [(x, y)] * 3)
    assert after.stage_state[0] == 12
    assert [m.stages[0].tolist() for m in metrics] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_the_states_of_stages_are_those_of_that_step():
    """A number that is not finite for one value of a state alone, which later microbatches have not."""
    _, params, x, y = problem()

    def counting(params, x, state):
        return pp.Output(dense(params, x) * torch.where(state == 9, math.nan, 1.0), state=state + 1)

    trainer = trainer_of(stages=[counting, dense], schedule=pp.zb_h1(2, 4), on_nonfinite="raise")
    with pytest.raises(pp.PipelineError, match=r"at 0F1, .*: its output; its input was"):
        trainer.steps(trainer.init(params, {0: torch.zeros(())}), [(x, y)] * 3)


def test_a_loss_and_a_norm_that_overflow_are_named():
    _, params, x, y = problem()
    trainer = trainer_of(loss=lambda y, t: squared(y, t) / 0, on_nonfinite="raise")
    with pytest.raises(
        pp.PipelineError,
        match=r"at 1F0, .*: FloatingPointError: the loss is inf.*; first not finite: its loss",
    ):
        trainer.step(trainer.init(params), x, y)
    huge = trainer_of(loss=lambda y, t: squared(y, t) * 1e200, on_nonfinite="raise")
    with pytest.raises(
        FloatingPointError, match="the norm of the gradients inf; every microbatch is finite by itself"
    ):
        huge.step(huge.init(params), x, y)


def test_what_is_finite_is_returned_as_without_looking():
    stages, params, x, y = problem()
    one = pp.value_and_grad(stages, squared, pp.zb_h1(2, 4), on_nonfinite="raise")(params, x, y)
    assert same_bits(one, pp.value_and_grad(stages, squared, pp.zb_h1(2, 4))(params, x, y))
    with pytest.raises(ValueError, match="on_nonfinite: got 'skip', expected 'raise' or 'ignore'"):
        pp.value_and_grad(stages, squared, pp.zb_h1(2, 4), on_nonfinite="skip")
    step = pp.value_and_grad(stages, squared, pp.gpipe(2, 4), on_nonfinite="raise")
    with pytest.raises(ValueError, match="under a torch.func transform, which has none to read"):
        torch.func.vmap(lambda x: step(params, x, y)[0])(torch.stack([x, x]))


# -- states of stages -----------------------------------------------------------------------


def normalised():
    """Two stages with running statistics: functions, parameters and states."""
    torch.manual_seed(0)
    stages = [pp.stage_from_module(BatchNormed(WIDTH)) for _ in range(2)]
    params, state = (
        {s: getattr(stage, part) for s, stage in enumerate(stages)} for part in ("params", "state")
    )
    return [stage.fn for stage in stages], params, state


def test_states_of_stages_are_trained_on_with():
    _, _, x, y = problem()
    functions, params, state = normalised()
    result = pp.value_and_grad(functions, squared, pp.one_f_one_b(2, 4), has_aux=True)(
        params, x, y, state=state
    )
    aux, grads = result.aux, result.grads
    trainer = trainer_of(pp.optim.sgd(0.1), functions)
    before = trainer.init(params, state)
    after, metrics = trainer.step(before, x, y)
    assert same_bits(after.stage_state, aux.state)
    assert same_bits(before.stage_state, state)
    assert torch.allclose(
        tree_leaves(after.params)[0], tree_leaves(params)[0] - 0.1 * tree_leaves(grads)[0], rtol=1e-12
    )
    assert metrics.stages == {}
    assert trainer.evaluate(after, x, y).isfinite()
    with pytest.raises(pp.StageError, match="which are its state: give it to the step"):
        trainer.step(trainer.init(params), x, y)
    with pytest.raises(TypeError, match="state: got"):
        trainer.init(params, [state])


def test_the_state_of_a_split_is_asked_for():
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), BatchNormed(WIDTH)).double()
    _, _, x, y = problem()
    split = pp.split(model, x, at=["1"])
    trainer = trainer_of(stages=split)
    with pytest.raises(ValueError, match="state: stage 1 is missing, whose buffers the .*; give split.state"):
        trainer.init(split.params)
    with pytest.raises(ValueError, match=r"params\[0\] lacks '0.bias'; give all names of split.params\[0\]"):
        trainer.init({0: {"weight": x}, 1: split.params[1]}, split.state)
    state, _ = trainer.step(trainer.init(split.params, split.state), x, y)
    assert not same_bits(state.stage_state, split.state)


def test_a_skipped_update_leaves_the_states_of_stages():
    _, _, x, y = problem()
    functions, params, state = normalised()
    trainer = trainer_of(pp.optim.sgd(0.1), functions)
    bad = x.clone()
    bad[0, 0] = math.nan
    before = trainer.init(params, state)
    after, metrics = trainer.step(before, bad, y)
    assert metrics.skipped == 1
    assert same_bits(after, before)
    wanted, _ = trainer.step(before, x, y)
    got, metrics = trainer.steps(before, [(bad, y), (x, y)])
    assert [m.skipped.item() for m in metrics] == [1, 0]
    assert same_bits(got, wanted)


def measuring(params, x):
    out = dense(params, x)
    return pp.Output(out, metrics={"size": out.square().mean()})


def test_metrics_of_stages_are_returned_by_stage_and_microbatch():
    _, params, x, y = problem()
    trainer = trainer_of(stages=[measuring, dense], schedule=pp.zb_h1(2, 4))
    state = trainer.init(params)
    _, metrics = trainer.step(state, x, y)
    wanted = torch.stack([dense(params[0], rows).square().mean() for rows in x.chunk(4)])
    assert torch.allclose(metrics.stages[0]["size"], wanted, rtol=1e-12)
    assert trainer.evaluate(state, x, y).isfinite()


# -- donated states -------------------------------------------------------------------------


def breaking(calls, after):
    """An update in place that fails at one call."""
    inner = pp.optim.sgd(0.1, donate=True)

    def update(grads, state, params, *, found_inf=None):
        calls.append(None)
        if len(calls) == after:
            raise ValueError("on purpose")
        return inner.update(grads, state, params, found_inf=found_inf)

    return inner._replace(update=update)


def test_a_state_that_a_failed_step_has_written_into_is_refused():
    _, params, x, y = problem()
    trainer = trainer_of(breaking(calls := [], 2))
    state = trainer.init(tree_map(torch.clone, params))
    copy = tree_map(torch.clone, state)
    with pytest.raises(pp.PipelineError, match="on purpose"):
        trainer.step(state, x, y)
    assert len(calls) == 2
    for use in (trainer.step, trainer.evaluate):
        with pytest.raises(
            ValueError,
            match="state: a step was given it, and has updated it in place, as donate=True says; go on from",
        ):
            use(state, x, y)
    after, _ = trainer.step(copy, x, y)
    wanted, _ = trainer_of(pp.optim.sgd(0.1)).step(trainer.init(params), x, y)
    assert same_bits(after.params, wanted.params)
    with pytest.raises(ValueError, match="state: a step was given it, and has updated it in place"):
        trainer.step(copy, x, y)
    trainer.step(after, x, y)


def test_a_state_that_a_failed_step_has_not_written_into_is_as_before():
    _, params, x, y = problem()
    for optimizer in (breaking([], 1), pp.optim.adamw(0.1)):
        calls = []

        def failing(p, x, calls=calls):
            calls.append(None)
            if len(calls) == 3:
                raise ValueError("on purpose")
            return dense(p, x)

        trainer = trainer_of(optimizer, [dense, failing], engine=pp.engines.functional)
        state = trainer.init(tree_map(torch.clone, params))
        copy = tree_map(torch.clone, state)
        with pytest.raises(pp.PipelineError, match="on purpose"):
            for _ in range(3):
                trainer.step(state, x, y)
        assert same_bits(state, copy)
        if optimizer.text().startswith("adamw"):
            trainer.step(state, x, y)


# -- what a step costs beside its work --------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip": 0.5, "scale": pp.dynamic_scale()},
        {"clip": 0.5, "norm_type": math.inf, "scale": pp.static_scale(2.0)},
        {"on_nonfinite": "ignore"},
        {"precision": pp.Precision(compute=torch.bfloat16, reduce=torch.float32, master=torch.float32)},
        {
            "clip": 0.5,
            "scale": pp.dynamic_scale(),
            "engine": pp.engines.graph(remat="full"),
        },
        {"clip": 0.5, "tied": {"w": [(0, "w"), (1, "w")]}},
    ],
    ids=" ".join,
)
def test_no_value_is_read_by_the_host_in_a_step(options):
    _, params, x, y = problem()
    params[1]["w"] = params[0]["w"].clone()
    rate = pp.optim.warmup_cosine(1e-2, 2, 10)
    trainer = trainer_of(
        pp.optim.adamw(rate), [measuring, dense], loss=lambda y, t: squared(y.float(), t.float()), **options
    )
    state, _ = trainer.step(trainer.init(params), x, y)
    trainer.evaluate(state, x, y)  # ranks compare values where they meet
    with Reads() as reads:
        for _ in range(2):
            state, metrics = trainer.step(state, x, y)
        weights = torch.arange(1.0, 5.0)
        state, metrics = trainer.step(state, x, y, loss_weights=weights)
        trainer.evaluate(state, x, y, loss_weights=weights)
    assert reads.found == []
    with Reads() as reads:
        metrics.loss.item()
    assert len(reads.found) == 1


def test_a_step_that_raises_reads_one_number():
    _, params, x, y = problem()
    trainer = trainer_of(on_nonfinite="raise")
    state, _ = trainer.step(trainer.init(params), x, y)
    with Reads() as reads:
        trainer.step(state, x, y)
    assert len(reads.found) == 1


def usage():
    """Tensors, resident bytes, threads, descriptors."""
    gc.collect()
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    return tensors, resident, threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))


def many_steps(rank, size, shape=None):
    """Steps of three numbers of microbatches in turn, on one transport; some fail, some are skipped.

    Over data ranks, the parameters are tied and cut.
    """
    _, params, x, y = problem()
    options = {"clip": 1.0, "scale": pp.dynamic_scale()}
    if shape == (1, 2):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp"))
        transport, own, build = (
            pp.P2P(timeout=30, mesh=mesh, axes=pp.Axes("pp", "dp"), shard="params"),
            params,
            lambda m: pp.interleaved_1f1b(1, m, 2),
        )
        params[1] = {"w": params[0]["w"].clone()}
        options |= {"tied": {"w": [(0, "w"), (1, "w")]}}
    else:
        transport, own = (pp.P2P(timeout=30), {rank: params[rank]}) if size == 2 else (pp.InProcess(), params)
        build = lambda m: pp.zb_h1(2, m)  # noqa: E731
    trainers = [
        trainer_of(pp.optim.adamw(1e-3), [measuring, dense], build(m), transport=transport, **options)
        for m in (2, 4, 8)
    ]
    state, bad, found = trainers[0].init(own), x / 0, []
    for n in range(100):
        state, _ = trainers[n % 3].step(state, bad if n % 40 == 7 else x, y)
        if n in (40, 99):
            found.append(usage())
    entries = [trainer._step.cache_info().currsize for trainer in trainers]
    transport.close()
    return found, entries, int(state.step)


def require_no_growth(answer):
    (before, after), entries, steps = answer
    assert after[0] <= before[0] + 8
    assert after[1] <= before[1] + 4 * 2**20
    assert after[2] <= before[2]
    assert after[3] <= before[3]
    assert entries == [1, 1, 1]
    assert steps == 97


def test_a_hundred_steps_do_not_grow_in_process():
    require_no_growth(many_steps(0, 1))


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_a_hundred_steps_do_not_grow(two, shape, request):
    if shape == (1, 2) and not request.config.getoption("--large"):
        pytest.skip("tied and cut parameters: run with --large")
    for answer in two(many_steps, shape, timeout=120):
        require_no_growth(answer)


# -- several ranks --------------------------------------------------------------------------


OPTIMIZERS = {
    "lr": (
        lambda r: pp.optim.adamw(1e-3 * (1 + r)),
        r"optimizer adamw\(lr 0.00[12], .*optimizer adamw\(lr 0.00[12], .* make its trainer with the same",
    ),
    "betas": (lambda r: pp.optim.adamw(1e-3, (0.9, 0.99 + 0.001 * r)), r"betas \(0.9, 0.99"),
    "decay": (lambda r: pp.optim.adamw(1e-3, weight_decay=0.1 * r), "weight decay 0"),
    "kind": (lambda r: pp.optim.sgd(1e-3) if r else pp.optim.adamw(1e-3), "optimizer (sgd|adamw)"),
    "rate": (
        lambda r: pp.optim.adamw(pp.optim.warmup_cosine(1e-3, 2 + r, 10)),
        r"warmup_cosine\(0.001, [23], 10",
    ),
    "momentum": (lambda r: pp.optim.sgd(1e-3, 0.5 * r), "momentum 0"),
    "own rate": (lambda r: pp.optim.sgd(lambda updates: 1e-3 * (1 + r)), r"lr .*lambda> \(0.00[12] at 0"),
    "later rate": (
        lambda r: pp.optim.sgd(lambda updates: 1e-3 * (1 + r * (updates > 50))),
        r"0.001\d* at 10, 0.00[12]\d* at 100",
    ),
    "mask": (
        lambda r: pp.optim.adamw(1e-3, mask=lambda params: bool(r)),
        "ones updated by the optimizer of stage 0 with the checksum",
    ),
    "own optimizer": (
        lambda r: pp.optim.from_updates(descent(1e-3 * (1 + r))),
        "ones updated by the optimizer of stage 0 with the checksum",
    ),
}


def descent(rate):
    """Differences of gradient descent, in optax's form, of which only the name of a function is known."""
    return pp.optim.Optimizer(
        lambda params: (), lambda grads, state, params: (tree_map(lambda g: -rate * g, grads), state)
    )


def disagreeing(rank, size, kind):
    """Two data ranks that are given other numbers are told so before anything is updated, within two
    seconds.
    """
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    stages, params, x, y = problem(1)
    optimizer, options, text = pp.optim.adamw(1e-3), {}, kind
    if kind in OPTIMIZERS:
        make, text = OPTIMIZERS[kind]
        optimizer = make(rank)
    elif kind == "scale":
        options = {"scale": pp.dynamic_scale(2.0 ** (8 + rank))}
        text = r"rank 1 has scale dynamic_scale\(512[^;]*\), rank 0 has scale dynamic_scale\(256[^;]*\);"
    elif kind == "clip":
        options, text = (
            {kind: 1.0 + rank},
            r"has clip_by_global_norm\(2.0, 2.0\), rank 0 has clip_by_global",
        )
    elif kind == "checksum_every":
        options, text = (
            {kind: 2 + rank},
            "checksum_every 3, rank 0 has checksum_every 2; every rank must be given the same",
        )
    elif kind == "seed":
        text = r"equal weights, seed \(0, [01]\)"
    elif kind in ("scale of the state", "step of the state"):
        options = {"scale": pp.dynamic_scale(256.0)}
    elif kind == "parameters that are cut":
        options = {"shard": "params"}
    began = time.monotonic()
    with new_trainer(
        stages, squared, pp.gpipe(1, 4), optimizer, mesh, axes=pp.Axes("pp", "dp"), **options
    ) as trainer:
        if kind in ("parameters", "parameters that are cut"):
            params, text = {0: {"w": params[0]["w"] + rank}}, "the parameters of stage 0 with the checksum"
        state = trainer.init(params)
        if kind == "scale of the state":
            state, text = (
                state._replace(scale={**state.scale, "scale": state.scale["scale"] * (1 + rank)}),
                "with the scale",
            )
        elif kind == "step of the state":
            state, text = state._replace(step=state.step + rank), "state of step [01]"
        elif kind == "moments":
            moments = {**state.optimizer[0], "mean": tree_map(lambda t: t + rank, state.optimizer[0]["mean"])}
            state, text = (
                state._replace(optimizer={0: moments}),
                "the optimizer state of stage 0 with the checksum",
            )
        elif kind == "state of stages":
            return refuse_state(trainer, params)
        with pytest.raises(pp.AgreementError, match=text):
            trainer.step(state, x, y, seed=(0, rank) if kind == "seed" else None)
    return time.monotonic() - began


def refuse_state(trainer, params):
    with pytest.raises(ValueError, match="each of the 2 data ranks would have another"):
        trainer.init(params, {0: torch.zeros(())})
    return 0.0


KINDS = [
    *OPTIMIZERS,
    "scale",
    "clip",
    "checksum_every",
    "scale of the state",
    "step of the state",
    "parameters",
    "parameters that are cut",
    "moments",
    "state of stages",
    "seed",
]


@pytest.mark.parametrize("kind", KINDS)
def test_data_ranks_begin_with_the_same_numbers(two, soon, kind):
    assert all(seconds < soon for seconds in two(disagreeing, kind))


def misfitting(rank, size):
    """Axes that the mesh does not have, and a mesh whose size does not fit the schedule."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    for axes in (pp.Axes("pp", "data"), pp.Axes("pp"), pp.Axes("pipe", "dp"), pp.Axes("pp", "dp", "dp")):
        with pytest.raises(ValueError, match="the mesh has the axes pp, dp; name each of them once"):
            trainer_of(mesh=mesh, axes=axes)
    with pytest.raises(ValueError, match="the schedule is for 2 ranks, the transport has 1"):
        trainer_of(mesh=mesh, axes=pp.Axes("pp", "dp"))


def unmade(rank, size):
    """A trainer that one rank cannot make: the other is told what and why by its first step, and does not
    wait at its second.
    """
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    stages, params, x, y = problem(1)
    options = {"mesh": mesh, "axes": pp.Axes("pp", "dp")}
    if rank:
        with pytest.raises(ValueError, match="on_nonfinite: got"):
            new_trainer(stages, squared, pp.gpipe(1, 4), pp.optim.sgd(0.1), on_nonfinite="", **options)
        return 0.0
    with new_trainer(stages, squared, pp.gpipe(1, 4), pp.optim.sgd(0.1), **options) as trainer:
        state, began = trainer.init(params), time.monotonic()
        for text in ("rank 1 failed outside its program: ValueError: on_nonfinite: got", "rank 1 failed"):
            with pytest.raises(pp.PipelineError, match=text):
                trainer.step(state, x, y)
        return time.monotonic() - began


def test_a_trainer_that_one_rank_cannot_make_is_told_to_the_others(two, soon):
    assert max(two(unmade)) < soon


def later_weights(rank, size, steps):
    """Loss weights of which one rank has another for the last microbatch alone."""
    _, params, x, y = problem()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    with trainer_of(mesh=mesh, schedule=pp.one_f_one_b(2, 8)) as trainer:
        state = trainer.init({rank: params[rank]})
        weights = [1.0] * 7 + [1.0 + rank]
        if steps == 1:
            with pytest.raises(
                pp.AgreementError,
                match=r"rank \d has loss weights \[1.0, .*, rank \d has loss weights \[1.0, ",
            ):
                trainer.step(state, x, y, loss_weights=weights)
        state, metrics = trainer.step(state, x, y, loss_weights=[1.0] * 8)
        return metrics.loss.item()


def wrong_in_the_block(rank, size, kind, soon):
    """One rank, or both, give another thing to ``init``, or raise by themselves; a rank that steps hears of
    it. Then both are closed.
    """
    stages, params, x, y = problem(2)
    mesh, begin = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), time.monotonic()
    text = r"params: got the stages \[\], this process runs" if kind != "own" else "no such file"
    error = FileNotFoundError if kind == "own" else ValueError
    wanted = error if rank or kind == "both" else pp.PipelineError
    told = text if wanted is error else f"rank 1 failed outside its program: {error.__name__}: {text}"
    with (
        pytest.raises(wanted, match=told),
        new_trainer(stages, squared, pp.gpipe(2, 2), pp.optim.sgd(0.1), mesh, axes=pp.Axes("pp")) as trainer,
    ):
        if kind != "own" and wanted is error:
            trainer.init({})
        state = trainer.init({rank: params[rank]})
        state, _ = trainer.step(state, x, y)
        if wanted is error:
            raise FileNotFoundError("no such file")
        trainer.step(state, x, y)
    assert time.monotonic() - begin < 2 * soon
    with new_trainer(stages, squared, pp.gpipe(2, 2), pp.optim.sgd(0.1), mesh, axes=pp.Axes("pp")) as trainer:
        state, _ = trainer.step(trainer.init({rank: params[rank]}), x, y)
    for call in (
        lambda: trainer.step(state, x, y),
        lambda: trainer.evaluate(state, x, y),
        lambda: trainer.init({rank: params[rank]}),
    ):
        with pytest.raises(RuntimeError, match="the trainer is closed"):
            call()


@pytest.mark.parametrize("kind", ["one", "own", "both"])
def test_an_error_that_ends_the_block_of_one_rank_is_told_to_the_other(two, soon, kind):
    """It was told that the process is gone."""
    two(wrong_in_the_block, kind, soon)


def test_the_loss_weights_of_every_microbatch_are_compared(two):
    refused, plain = two(later_weights, 1), two(later_weights, 0)
    assert refused == plain and len({*refused}) == 1


def test_meshes_that_do_not_fit_are_named(two):
    two(misfitting)


def lying_differently(rank, size, kind):
    """Tied leaves of other placements, and a stage that two ranks cut by different plans."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    full, x = normal(WIDTH, WIDTH), normal(ROWS, WIDTH)
    part = DTensor.from_local(full.chunk(2)[rank].contiguous(), mesh["tp"], [Shard(0)])
    whole = DTensor.from_local(full.clone(), mesh["tp"], [Replicate()])
    options = {"mesh": mesh, "axes": pp.Axes("pp", model="tp")}

    def stage(p, x):
        return x + p["w"].sum()

    if kind == "tied":
        schedule, params = pp.interleaved_1f1b(1, 4, 2), {0: {"w": part}, 1: {"w": whole}}
        options["tied"] = {"w": [(0, "w"), (1, "w")]}
        error, text = ValueError, "tied parameters have one shape and dtype"
    else:
        schedule, params = pp.gpipe(1, 4), {0: {"w": part if rank else whole}}
        error, text = pp.AgreementError, r"params\[0\]\['w'\]: torch.float64 of \[4,4\]"
    began = time.monotonic()
    stages = [stage] * len(params)
    with (
        trainer_of(stages=stages, schedule=schedule, **options) as trainer,
        pytest.raises((error, pp.PipelineError), match=text),
    ):
        trainer.step(trainer.init(params), x, x)
    return time.monotonic() - began


@pytest.mark.parametrize("kind", ["tied", "plans"])
def test_leaves_that_lie_differently_are_named(two, soon, kind):
    assert all(seconds < soon for seconds in two(lying_differently, kind))


def whole_leaves(rank, size, shard, what):
    """A state with whole tensors in the place of the parts that a trainer keeps; then that state itself."""
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("pp", "dp"))
    options = {"mesh": mesh, "axes": pp.Axes("pp", "dp"), "shard": shard}
    x = normal(ROWS, WIDTH)
    with trainer_of(stages=[dense], schedule=pp.gpipe(1, 2), **options) as trainer:
        state = trainer.init({0: {"w": normal(WIDTH, WIDTH)}})
        gathered = full(getattr(state, what))
        with pytest.raises(
            (ValueError, pp.PipelineError),
            match=rf"state.{what}\[0\].*: got a tensor that is whole, expected a DTensor of \[4,4\] .*init",
        ):
            trainer.step(state._replace(**{what: gathered}), x, x)
        trainer.step(state, x, x)


@pytest.mark.parametrize(
    "shard, what", [("params", "params"), ("params", "optimizer"), ("optimizer", "optimizer")]
)
def test_whole_leaves_in_a_state_of_parts_are_named(two, shard, what):
    two(whole_leaves, shard, what)


def naming(rank, size, shape, kind):
    """The rank where a number is first not finite is named on every rank, and training goes on."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp"))
    pipe, data = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    pipes = shape[0]
    _, params, x, y = problem(2)
    last = pipes == 2 and kind != "F"
    x[12, 0] = 77.0
    at = torch.tanh(x[12] @ params[0]["w"])[0].item() if last else 77.0
    stages = [dense, spoiled(at, kind)] if last else [spoiled(at, kind), dense]
    schedule = pp.zb_h1(2, 4) if pipes == 2 else pp.interleaved_1f1b(1, 4, 2)
    good, mine = x.clone(), {s: params[s] for s in schedule.model_stages_of(pipe)}
    good[12, 0] = 1.0
    options = {
        "mesh": mesh,
        "axes": pp.Axes("pp", "dp"),
        "engine": pp.engines.functional,
        "on_nonfinite": "raise",
    }
    with trainer_of(stages=stages, schedule=schedule, **options) as trainer:
        state = trainer.init(mine)
        state, _ = trainer.step(state, good, y)
        began = time.monotonic()
        with pytest.raises(
            pp.PipelineError, match="FloatingPointError: the loss .*; first not finite: "
        ) as caught:
            trainer.step(trainer.init(mine), x if data == shape[1] - 1 else good, y)
        seconds = time.monotonic() - began
        state, _ = trainer.step(state, good, y)
    error = caught.value
    return error.rank, error.stage, error.microbatch, str(error.instruction), seconds, int(state.step)


@pytest.mark.parametrize(
    "shape, kind, place", [((2, 1), "F", (0, 0, 3)), ((2, 1), "W", (1, 1, 3)), ((1, 2), "W", (1, 0, 3))]
)
def test_every_rank_names_where_a_number_was_first_not_finite(two, soon, shape, kind, place):
    answers = two(naming, shape, kind)
    for answer in answers:
        assert answer[:3] == place
        assert answer[4] < soon
        assert answer[5] == 2
    assert answers[0][3] == answers[1][3]


def gradients_of_two(rank, size):
    """A step of ``value_and_grad`` over two ranks, without a mesh."""
    _, params, x, y = problem(2)
    x[12, 0] = 77.0
    with pp.P2P(timeout=30) as transport:
        options = {"engine": pp.engines.functional, "on_nonfinite": "raise"}
        step = pp.value_and_grad([spoiled(77.0, "W"), dense], squared, pp.zb_h1(2, 4), transport, **options)
        with pytest.raises(
            pp.PipelineError, match="first not finite: the gradient of its parameter 'w'"
        ) as caught:
            step({rank: params[rank]}, x, y)
        x[12, 0] = 1.0
        loss, _ = step({rank: params[rank]}, x, y)
    return caught.value.rank, str(caught.value.instruction), loss.isfinite().item()


def test_gradients_of_two_ranks_are_named_too(two):
    answers = two(gradients_of_two)
    assert answers[0] == answers[1]
    assert answers[0][0] == 0
    assert answers[0][2]


def with_states(rank, size):
    """States and metrics of stages over two ranks of a pipeline, as in one process."""
    _, _, x, y = problem()
    functions, params, state = normalised()
    schedule = pp.zb_h1(2, 4)
    with trainer_of(pp.optim.sgd(0.1), functions, schedule) as alone:
        wanted, _ = alone.step(alone.init(tree_map(torch.clone, params), tree_map(torch.clone, state)), x, y)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    with trainer_of(pp.optim.sgd(0.1), functions, schedule, mesh=mesh) as trainer:
        after, _ = trainer.step(trainer.init({rank: params[rank]}, {rank: state[rank]}), x, y)
    assert same_bits(
        (after.stage_state, after.params[rank]), ({rank: wanted.stage_state[rank]}, wanted.params[rank])
    )


def test_states_of_stages_over_two_ranks(two):
    two(with_states)
