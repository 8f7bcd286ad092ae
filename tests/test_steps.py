"""The front door in process: losses, gradients and outputs are those of the unpipelined model."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import given, strategies as st

import ppfunc as pp
from tests import models
from tests.conftest import few
from tests.models import affine, same_bits, squared

D = 4
ENGINES = {"graph": pp.engines.graph, "functional": pp.engines.functional}


class Boundary(NamedTuple):
    """What travels between the stages of the tree model."""

    hidden: torch.Tensor
    extra: dict[str, Any]


def dense_params(generator, dtype=torch.float64):
    return {
        "w": torch.randn(D, D, generator=generator, dtype=torch.float64).to(dtype),
        "b": torch.randn(D, generator=generator, dtype=torch.float64).to(dtype),
    }


def tree_first(params, x):
    return Boundary(
        affine(params, x["value"]),
        {"ids": x["ids"], "mask": x["ids"] > 2, "scale": x["value"][:, :1], "none": None},
    )


def tree_middle(params, x):
    hidden = affine(params, x.hidden) * x.extra["mask"][:, None] + params["table"][x.extra["ids"]]
    return Boundary(hidden, {**x.extra, "scale": x.extra["scale"] * params["b"].sum()})


def tree_last(params, x):
    return affine(params, x.hidden * x.extra["scale"])


def whole(stages, loss_fn, params, inputs, targets, weights):
    """The loss without a pipeline: a loop over microbatches and stages."""
    total = 0
    for x, target, weight in zip(inputs, targets, weights, strict=True):
        for stage, fn in enumerate(stages):
            x = fn(params[stage], x)
        total = total + weight * loss_fn(x, target)
    return total


def rows(batch, m):
    """The microbatches of a batch, one after the other."""
    if isinstance(batch, pp.Microbatches):
        return list(batch)
    return [optree.tree_map(lambda t: t.chunk(m)[i], batch) for i in range(m)]  # noqa: B023


def compare(
    stages, loss_fn, schedule, params, inputs, targets, engine=pp.engines.graph, weights=None, tolerance=1e-12
):
    """Run the pipeline and the loop; returns what the pipeline returned."""
    m = schedule.microbatches
    step = pp.value_and_grad(stages, loss_fn, schedule, engine=engine, loss_weights=weights)
    loss, grads = step(params, inputs, targets)
    per = [1 / m] * m if weights is None else weights
    want, want_loss = torch.func.grad_and_value(
        lambda p: whole(stages, loss_fn, p, rows(inputs, m), rows(targets, m), per)
    )(params)
    assert_near(
        loss, want_loss.to(torch.promote_types(want_loss.dtype, torch.float32)), tolerance
    )  # halves are added up in float32
    optree.tree_map(lambda a, b: assert_near(a, b, tolerance), grads, want)
    assert optree.tree_structure(grads) == optree.tree_structure(dict(params))
    return loss, grads


def assert_near(a, b, tolerance):
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert (a - b).abs().sum() <= tolerance * (1e-30 + b.abs().sum())


problem = partial(models.problem, leaves="wb")


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("builder", [pp.gpipe, pp.one_f_one_b])
@few(6)
@given(stages=st.integers(1, 5), m=st.integers(1, 9))
def test_gradients_are_those_of_the_unpipelined_model(builder, engine, stages, m):
    params, inputs, targets = problem(stages, m)
    compare([affine] * stages, squared, builder(stages, m), params, inputs, targets, engine)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_trees_integers_masks_and_none_pass_the_boundaries(engine):
    stages = [tree_first, tree_middle, tree_middle, tree_last]
    generator = torch.Generator().manual_seed(0)
    params = {s: dense_params(generator) for s in range(4)}
    for s in (1, 2):
        params[s]["table"] = torch.randn(5, D, generator=generator, dtype=torch.float64)
    inputs = {
        "value": torch.randn(18, D, generator=generator, dtype=torch.float64),
        "ids": torch.arange(18) % 5,
    }
    targets = torch.randn(18, D, generator=generator, dtype=torch.float64)
    compare(stages, squared, pp.one_f_one_b(4, 6), params, inputs, targets, engine)


@pytest.mark.filterwarnings("ignore:.*nothing depends on")
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_unused_and_frozen_parameters_and_stages_without_any(engine):
    def unused(params, x):
        return x * params["used"]

    def frozen(params, x):
        return x @ params["w"].detach()

    def identity(params, x):
        return x

    stages = [unused, identity, frozen, lambda params, x: torch.sin(x)]
    one = torch.tensor([2.0], dtype=torch.float64)
    params = {0: {"used": one, "unused": one}, 1: {}, 2: {"w": torch.eye(D, dtype=torch.float64)}, 3: ()}
    _, inputs, targets = problem(4, 5)
    _, grads = compare(stages, squared, pp.one_f_one_b(4, 5), params, inputs, targets, engine)
    assert grads[0]["unused"] == 0
    assert grads[2]["w"].abs().sum() == 0


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("m", [1, 2, 5])
def test_one_tensor_used_twice_gets_both_parts_of_its_gradient(engine, m):
    def nested(params, x):
        return x @ params["w"] @ params["v"] @ params["w"]

    w, v = torch.randn(2, D, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    _, inputs, targets = problem(1, m)
    compare([nested], squared, pp.gpipe(1, m), {0: {"w": w, "v": v}}, inputs, targets, engine)

    def chain(params, x):
        for weight in params:
            x = x @ weight
        return x

    compare([chain], squared, pp.gpipe(1, m), {0: [w, v, w]}, inputs, targets, engine)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_low_and_mixed_precision(engine):
    params, inputs, targets = problem(3, 4, dtype=torch.bfloat16)
    compare([affine] * 3, squared, pp.one_f_one_b(3, 4), params, inputs, targets, engine, tolerance=2e-2)

    def down(p, x):
        return affine(p, x).bfloat16()

    def up(p, x):
        return affine(p, x.double())

    params, inputs, targets = problem(3, 4)
    compare([affine, down, up], squared, pp.gpipe(3, 4), params, inputs, targets, engine, tolerance=1e-6)


def test_integer_parameters_get_zeros_of_their_own_dtype():
    def lookup(params, x):
        return x * params["scale"] + params["ids"]

    params = {0: {"scale": torch.tensor(2.0), "ids": torch.arange(D)}}
    step = pp.value_and_grad([lookup], squared, pp.gpipe(1, 2))
    _, grads = step(params, torch.ones(2, D), torch.zeros(2, D))
    assert grads[0]["ids"].dtype == torch.int64
    assert grads[0]["ids"].tolist() == [0] * D
    assert grads[0]["scale"] != 0


def test_microbatches_of_different_shapes_and_weights():
    generator = torch.Generator().manual_seed(3)
    params = {s: dense_params(generator) for s in range(3)}
    sizes = [2, 5, 2, 1]
    inputs, targets = (
        pp.Microbatches([torch.randn(n, D, generator=generator, dtype=torch.float64) for n in sizes])
        for _ in range(2)
    )
    weights = [n / sum(sizes) for n in sizes]
    loss, grads = compare(
        [affine] * 3, squared, pp.one_f_one_b(3, 4), params, inputs, targets, weights=weights
    )
    step = pp.value_and_grad([affine] * 3, squared, pp.one_f_one_b(3, 4))
    again, same = step(params, inputs, targets, loss_weights=torch.tensor(weights, dtype=torch.float64))
    assert torch.equal(loss, again)
    assert torch.equal(grads[1]["w"], same[1]["w"])


def test_parameters_that_require_gradients_leave_no_history():
    params, inputs, targets = problem(2, 3)
    params = {s: {k: torch.nn.Parameter(v) for k, v in tree.items()} for s, tree in params.items()}
    loss, grads = pp.value_and_grad([affine] * 2, squared, pp.gpipe(2, 3))(params, inputs, targets)
    assert not loss.requires_grad
    assert not any(g.requires_grad for g in optree.tree_leaves(grads))
    assert all(p.grad is None for p in optree.tree_leaves(params))


@pytest.mark.parametrize("m", [1, 2, 3])
def test_gradients_belong_to_the_caller(m):
    """x + a + b: the gradients of a, b and x are one tensor, unless somebody takes care."""

    def add(params, x):
        return x + params["a"] + params["b"]

    zeros = torch.zeros(2, D)
    params = {s: {"a": zeros.clone(), "b": zeros.clone()} for s in range(2)}
    step = pp.value_and_grad([add] * 2, lambda y, t: (y * t).sum(), pp.gpipe(2, m))
    batch = torch.ones(m * 2, D), torch.ones(m * 2, D)
    _, grads = step(params, *batch)
    leaves = optree.tree_leaves(grads)
    for leaf in leaves:
        leaf.mul_(2)
    assert all(torch.equal(leaf, torch.full((2, D), 2.0)) for leaf in leaves)
    assert all(torch.equal(leaf, torch.ones(2, D)) for leaf in optree.tree_leaves(step(params, *batch)[1]))
    assert torch.equal(batch[1], torch.ones(m * 2, D))


def files_entered(function):
    """List the modules of ppfunc in which a call runs a function."""
    files, package = set(), os.path.join(os.path.dirname(pp.__file__), "")

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            files.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return files


def test_a_call_goes_through_few_files():
    """A first call went through 63 modules of the package, then 46; a second one through 29, then 11."""
    params, inputs, targets = problem(2, 4)
    pp.value_and_grad([affine] * 2, squared, pp.gpipe(2, 4))(params, inputs, targets)  # loads what is lazy
    step = pp.value_and_grad([affine] * 2, squared, pp.gpipe(2, 4))
    assert len(files_entered(lambda: step(params, inputs, targets))) <= 40
    assert len(files_entered(lambda: step(params, inputs, targets))) <= 9


def test_evaluation_returns_loss_and_outputs():
    params, inputs, targets = problem(3, 4)
    schedule = pp.one_f_one_b(3, 4)
    stages = [affine] * 3
    result = pp.evaluate(stages, squared, schedule, return_outputs=True)(params, inputs, targets)
    loss, outputs = result.loss, result.outputs
    trained, _ = pp.value_and_grad(stages, squared, schedule)(params, inputs, targets)
    assert torch.equal(loss, trained)
    want = inputs
    for s in range(3):
        want = affine(params[s], want)
    torch.testing.assert_close(outputs, want, rtol=1e-12, atol=0)
    assert torch.equal(pp.evaluate(stages, squared, pp.inference(3, 4))(params, inputs, targets), loss)
    assert torch.equal(
        pp.evaluate(stages, None, pp.inference(3, 4), return_outputs=True)(params, inputs), outputs
    )
    ragged = pp.Microbatches([inputs[:3], inputs[3:5], inputs[5:8], inputs[8:]])
    made = pp.evaluate(stages, None, schedule, return_outputs=True)(params, ragged)
    assert isinstance(made, pp.Microbatches)
    assert [len(y) for y in made] == [3, 2, 3, 4]
    torch.testing.assert_close(made.join(), outputs, rtol=1e-12, atol=0)


def test_every_schedule_that_adds_up_in_the_same_order_gives_the_same_bits():
    params, inputs, targets = problem(4, 6, dtype=torch.float32)
    results = [
        pp.value_and_grad([affine] * 4, squared, schedule)(params, inputs, targets)
        for schedule in (
            pp.gpipe(4, 6),
            pp.one_f_one_b(4, 6),
            pp.zb_h1(4, 6),
            pp.interleaved_1f1b(2, 6, 2),
            pp.zbv(2, 6),
        )
    ]
    for loss, grads in results[1:]:
        assert torch.equal(loss, results[0][0])
        assert same_bits(grads, results[0][1])


@pytest.mark.parametrize("builder", [pp.dualpipe, pp.schedule.chimera])
def test_a_bidirectional_schedule_takes_each_stage_of_the_model_once(builder):
    """Its second chain runs replicas of the stages; their gradients are in the sum."""
    params, inputs, targets = problem(4, 10)
    compare([affine] * 4, squared, builder(4, 10), params, inputs, targets)


def dropped(params, x):
    return torch.nn.functional.dropout(affine(params, x), 0.5)


def test_random_stages_depend_on_seed_step_stage_and_microbatch_only():
    params, inputs, targets = problem(2, 4)
    with pytest.raises(ValueError, match="seed"):
        pp.value_and_grad([dropped] * 2, squared, pp.gpipe(2, 4))(params, inputs, targets)
    before = torch.get_rng_state()
    results = [
        pp.value_and_grad([dropped] * 2, squared, schedule, engine=engine)(
            params, inputs, targets, seed=(7, 1)
        )
        for schedule in (pp.gpipe(2, 4), pp.one_f_one_b(2, 4), pp.interleaved_1f1b(1, 4, 2))
        for engine in ENGINES.values()
    ]
    assert torch.equal(torch.get_rng_state(), before)
    for loss, grads in results[1:]:
        assert torch.equal(loss, results[0][0])
        assert same_bits(grads, results[0][1])
    other, _ = pp.value_and_grad([dropped] * 2, squared, pp.gpipe(2, 4))(params, inputs, targets, seed=(7, 2))
    assert other != results[0][0]


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_parameters_of_any_strides(engine):
    """A transposed parameter; then the same values in another layout, which makes another program."""

    def stage(params, x):
        return torch.tanh(x @ params["w"].reshape(-1).flip(0).reshape(D, D) + params["b"])

    params, inputs, targets = problem(2, 3)
    step = pp.value_and_grad([stage] * 2, squared, pp.gpipe(2, 3), engine=engine)
    expected = step(params, inputs, targets)
    turned = {s: {"w": p["w"].T.contiguous().T, "b": p["b"][:1].expand(D)} for s, p in params.items()}
    for held in (turned, optree.tree_map(torch.clone, turned)):
        compare([stage] * 2, squared, pp.gpipe(2, 3), held, inputs, targets, engine)
        step(held, inputs, targets)
    assert optree.tree_all(optree.tree_map(torch.equal, step(params, inputs, targets), expected))


def test_a_stage_of_other_arguments_is_answered_by_those_it_has():
    params, inputs, targets = problem(2, 2)
    for engine in (pp.engines.graph, pp.engines.functional, pp.engines.eager):
        step = pp.value_and_grad([affine, lambda x: x], squared, pp.gpipe(2, 2), engine=engine)
        told = r"^stage 1: .*takes 1 positional argument.*Instead: a stage is called as fn\(params, x\)"
        with pytest.raises(pp.StageError, match=told):
            step(params, inputs, targets)


def test_what_the_loss_function_does_wrong_is_told_as_its_own():
    params, inputs, targets = problem(2, 2)
    for loss_fn, told in [
        (
            lambda y: y.sum(),
            r"^the loss: it raised TypeError.*takes 1 positional argument.*called as loss\(y, target\), and"
            r" the last stage returned y = float64\[.*\]\. Instead: take both; .* lambda y, _: y.loss\.$",
        ),
        (
            lambda y, t: 1.0,
            r"^the loss: it returned 1.0 of type float, expected a tensor. Instead: return a scalar tensor",
        ),
        (
            lambda y, t: (y.sum(), y, y),
            r"of type tuple, expected a tensor. .*return \(loss, aux\), and pass has_aux",
        ),
        (lambda y, t: None, r"^the loss: it returned None"),
    ]:
        for engine in (pp.engines.graph, pp.engines.functional, pp.engines.eager):
            with pytest.raises(pp.StageError, match=told):
                pp.value_and_grad([affine] * 2, loss_fn, pp.gpipe(2, 2), engine=engine)(
                    params, inputs, targets
                )


@pytest.mark.parametrize("first", [True, False])
def test_a_stage_that_returns_nothing_is_refused_itself(first):
    stages = [lambda p, x: None, affine] if first else [affine, lambda p, x: None]
    with pytest.raises(
        pp.StageError,
        match=rf"^stage {int(not first)}: it raised TypeError: it returned None, expected its activation",
    ):
        pp.value_and_grad(stages, squared, pp.gpipe(2, 2))(*problem(2, 2))


@pytest.mark.parametrize("engine", [pp.engines.graph, pp.engines.functional, pp.engines.eager])
@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda y: pp.Output(y, metrics={"acc": 0.5}), r"metrics\['acc'\]: got 0\.5 of type float"),
        (lambda y: pp.Output(y, loss=3.0), "loss: got 3.0 of type float"),
        (lambda y: pp.Output(y, state={"n": 3}), r"state\['n'\]: got 3 of type int"),
        (lambda y: (y, 1j), r"y\[1\]: got 1j of type complex"),
    ],
)
def test_what_is_no_tensor_in_an_output_is_named_as_it_was_returned(engine, made, told):
    stages = [affine, lambda p, x: made(affine(p, x))]
    with pytest.raises(
        pp.StageError, match=f"^stage 1: it raised TypeError: returned {told}, expected a tensor"
    ):
        pp.value_and_grad(stages, squared, pp.gpipe(2, 2), engine=engine, has_aux=True)(*problem(2, 2))


@pytest.mark.parametrize("engine", [pp.engines.functional, pp.engines.eager])
def test_an_engine_without_options_says_how_it_is_used(engine):
    with pytest.raises(
        TypeError,
        match=f"^{engine.__name__}: got no arguments, .* give engine=ppfunc.engines.{engine.__name__} it",
    ):
        engine()


def test_steps_run_in_inference_mode():
    params, inputs, targets = problem(2, 2)
    stages, schedule = [affine] * 2, pp.gpipe(2, 2)
    wanted = pp.value_and_grad(stages, squared, schedule)(params, inputs, targets)
    with torch.inference_mode():
        loss = pp.evaluate(stages, squared, schedule)(params, inputs, targets)
        made = pp.value_and_grad(stages, squared, schedule)(params, inputs, targets)
    assert torch.equal(loss, wanted[0])
    assert same_bits(made, wanted)
    assert not loss.is_inference()


@pytest.mark.filterwarnings("ignore:.*nothing depends on")
def test_autocast_may_change_what_travels():
    params, inputs, targets = problem(2, 2, dtype=torch.float32)
    step = pp.value_and_grad([lambda p, x: x @ p["w"]] * 2, squared, pp.gpipe(2, 2))
    plain, _ = step(params, inputs, targets)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, _ = step(params, inputs, targets)
    assert rounded != plain
    assert step(params, inputs, targets)[0] == plain


def test_an_overlapped_function_that_is_none_is_refused():
    for wrong in ("interleaved", pp.interleaved, pp.two_streams):
        with pytest.raises(TypeError, match=r"overlapped: got .*ppfunc.(interleaved|two_streams)\(\)"):
            pp.value_and_grad([affine] * 4, squared, pp.dualpipev(2, 4), overlapped=wrong)
