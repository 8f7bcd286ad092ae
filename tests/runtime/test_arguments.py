"""Arguments of a step: what is read, what is refused and how, and how a call of the same form is
recognised.
"""

from __future__ import annotations

import math
import timeit
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.utils._pytree as torch_pytree

import ppfunc as pp
from ppfunc.runtime.values.arguments import RawArguments, read_arguments, read_loss_weights
from tests.models import dense, normal, same_bits, squared

D, M, B = 3, 4, 2
SCHEDULE = pp.one_f_one_b(2, M)


class Pair(NamedTuple):
    """A batch with names."""

    x: torch.Tensor
    ids: torch.Tensor


def given(**changes):
    """Arguments of a step of two stages, some of them changed."""
    params = {s: {"w": normal(D, D, seed=s)} for s in range(2)}
    return replace(RawArguments(params, normal(M * B, D, seed=2), normal(M * B, D, seed=3)), **changes)


def read(raw, last=None, **options):
    return read_arguments(raw, SCHEDULE, [0, 1], {1}, last and last.form, **options)


# -- batches
# ---------------------------------------------------------------------------------------------------


def test_a_whole_batch_is_cut_into_views():
    batch = {"pair": Pair(normal(M * B, D), torch.arange(M * B)), "none": None}
    cut = pp.microbatch(batch, M)
    assert len(cut) == M
    for m, tree in enumerate(cut):
        assert tree["none"] is None
        assert torch.equal(tree["pair"].x, batch["pair"].x[m * B : (m + 1) * B])
        assert torch.equal(tree["pair"].ids, batch["pair"].ids[m * B : (m + 1) * B])
        assert all(t._base is not None and t.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()  # noqa: E501
                   for t, whole in zip(tree["pair"], batch["pair"], strict=True))  # fmt: skip
    assert same_bits(cut.join(), batch)
    arguments = read(given(inputs=batch))
    assert [len(row) for row in arguments.inputs] == [2] * M
    assert arguments.inputs[1][0].data_ptr() == batch["pair"].x[B:].data_ptr()
    assert arguments.form.rows == B


def test_microbatches_may_differ_in_structure():
    trees = [{"x": normal(n, D)} if n % 2 else (normal(n, D), None) for n in range(1, M + 1)]
    arguments = read(given(inputs=pp.Microbatches(trees)))
    assert arguments.form.rows is None
    assert [str(s) for s in arguments.form.inputs] == [
        "{'x': float64[1,3] no grad}",
        "(float64[2,3] no grad, None)",
        "{'x': float64[3,3] no grad}",
        "(float64[4,3] no grad, None)",
    ]


def test_microbatches_are_a_sequence_and_a_tree():
    cut = pp.microbatch(torch.arange(6), 3)
    assert [list(map(int, row)) for row in cut] == [[0, 1], [2, 3], [4, 5]]
    assert len(cut) == 3
    assert torch.equal(cut[1], torch.tensor([2, 3]))
    assert cut.map(torch.sum).stack().tolist() == [1, 5, 9]
    assert repr(cut) == "Microbatches(3 of int64[2] no grad)"
    assert (
        repr(pp.Microbatches([torch.zeros(1), torch.zeros(2)]))
        == "Microbatches(2 of float32[1] and float32[2])"
    )
    doubled = torch_pytree.tree_map(lambda t: t * 2, cut)
    assert isinstance(doubled, pp.Microbatches)
    assert doubled.join().tolist() == [0, 2, 4, 6, 8, 10]
    assert torch.func.vmap(lambda x: pp.Microbatches([x, x + 1]))(torch.arange(2)).join().tolist() == [
        0,
        1,
        1,
        2,
    ]


REFUSED_BATCHES = {
    "rows that m does not divide": (
        normal(6, D),
        r"inputs: got 6 rows in shape \(6, 3\), which 4 microbatches do not divide; .* are 2 and 3",
    ),
    "fewer rows than microbatches": (
        {"a": [normal(3, D)]},
        r"inputs\['a'\]\[0\]: got 3 rows .*, which 4 microbatches do not divide; .* are 1 and 3",
    ),
    "no rows": (normal(0, D), r"inputs: got 0 rows .* the nearest that do are none"),
    "a scalar": (
        (normal(M, D), torch.tensor(1.0)),
        r"inputs\[1\]: got a scalar, expected a leading batch axis",
    ),
    "leaves of different lengths": (
        Pair(normal(8, D), torch.arange(4)),
        r"same number of rows in axis 0, got inputs\.x: 8, inputs\.ids: 4",
    ),
    "another number of microbatches": (
        pp.Microbatches([normal(2, D)] * 3),
        r"inputs: got 3 microbatches, the schedule has 4",
    ),
    "nothing": (None, r"inputs: got None, but this process runs stage 0"),
}


@pytest.mark.parametrize("what", REFUSED_BATCHES)
def test_a_batch_that_does_not_fit_is_refused_by_the_path_of_its_leaf(what):
    batch, told = REFUSED_BATCHES[what]
    with pytest.raises(ValueError, match=told):
        read(given(inputs=batch))


def test_none_is_a_target_where_there_is_a_loss():
    read_targets = read(given(targets=None)).targets
    assert [*read_targets] == [()] * M and read(given(targets=None)).form.targets[0].leaves == ()


NO_TENSORS = {
    "numpy": (lambda t: t.numpy().repeat(99, 0), r"inputs: got .* of type ndarray, expected a tensor"),
    "a complex number": (
        lambda t: {"x": t, "scale": 2j},
        r"inputs\['scale'\]: got 2j of type complex, expected a tensor",
    ),
    "sparse": (lambda t: t.to_sparse(), r"inputs: got a sparse_coo tensor, expected a dense one"),
    "Microbatches within a tree": (
        lambda t: {"x": pp.microbatch(t, M)},
        r"inputs: got Microbatches within a tree; expected Microbatches of trees",
    ),
    "Microbatches of Microbatches": (
        lambda t: pp.Microbatches([pp.microbatch(t, 2)] * M),
        r"inputs\[0\]: got Microbatches within a tree",
    ),
}


@pytest.mark.parametrize("what", NO_TENSORS)
@pytest.mark.parametrize("known", [False, True])
def test_what_is_no_dense_tensor_is_refused_by_its_path(what, known):
    """Be it in the first call, or in one after a call that was right."""
    make, told = NO_TENSORS[what]
    with pytest.raises(TypeError, match=told) as raised:
        read(given(inputs=make(normal(M * B, D))), read(given()) if known else None)
    assert len(str(raised.value)) < 300


def test_microbatch_refuses_what_it_cannot_cut():
    for wrong in (2.0, 0):
        with pytest.raises(ValueError, match=f"microbatches = {wrong}, expected an integer of at least 1"):
            pp.microbatch(normal(4, D), wrong)
    with pytest.raises(TypeError, match="batch: got Microbatches within a tree"):
        pp.microbatch(pp.microbatch(normal(4, D), 2), 2)


@pytest.mark.parametrize("name", ["targets", "extras"])
def test_other_rows_than_those_of_the_inputs_are_refused(name):
    """A loss that broadcasts took them for right; Microbatches say that it is meant."""
    few = normal(M, D)
    step = pp.value_and_grad([dense, lambda p, x, e: dense(p, x) * e], squared, SCHEDULE)

    def call(batch):
        raw = given()
        params, inputs, targets = raw.params, raw.inputs, raw.targets
        return step(
            params,
            inputs,
            batch if name == "targets" else targets,
            extras={1: batch if name == "extras" else inputs},
        )

    with pytest.raises(
        ValueError,
        match=(
            rf"{name}(\[1\])?: got 4 rows in axis 0, the inputs have 8; expected the same rows, or"
            r" ppfunc.microbatch"
        ),
    ):
        call(few)
    repeated = few.repeat_interleave(B, 0)
    assert same_bits(call(pp.microbatch(few, M)), call(repeated))


# -- dictionaries by stage
# ---------------------------------------------------------------------------------------

REFUSED = {
    "a stage that lacks": (
        {"params": {0: {}}},
        ValueError,
        r"params: got the stages \[0\], this process runs \[0, 1\]; .* each gives a transport",
    ),
    "a stage too many": (
        {"params": {0: {}, 1: {}, 2: {}}},
        ValueError,
        r"params: got the stages \[0, 1, 2\], .* give those, as {s: params\[s\] for s in \[0, 1\]}$",
    ),
    "keys of another type": (
        {"params": {"0": {}, 1: {}}},
        ValueError,
        r"params: got the stages \['0', 1\], this",
    ),
    "a list": (
        {"params": [{}, {}]},
        TypeError,
        r"params: got \[{}, {}\] of type list, expected a dictionary",
    ),
    "extras of another stage": (
        {"extras": {2: normal(8)}},
        ValueError,
        r"extras: got the stages \[2\], this process runs \[0, 1\]",
    ),
    "extras in a list": (
        {"extras": [normal(8)]},
        TypeError,
        r"extras: got \[tensor.* of type list, expected a dict",
    ),
    "state of another stage": (
        {"state": {-1: normal(8)}},
        ValueError,
        r"state: got the stages \[-1\], this process runs \[0, 1\]",
    ),
    "too few weights": (
        {"loss_weights": [1, 2]},
        ValueError,
        r"loss_weights: got shape \(2,\), expected one weight for each of the 4",
    ),
    "weights of another shape": (
        {"loss_weights": torch.ones(4, 1)},
        ValueError,
        r"loss_weights: got shape \(4, 1\)",
    ),
    "no weights": (
        {"loss_weights": "abcd"},
        TypeError,
        r"loss_weights: got 'abcd', expected one number for each",
    ),
    "complex weights": (
        {"loss_weights": torch.ones(4) * 1j},
        TypeError,
        r"loss_weights: got .*, expected one number",
    ),
    "weights that are nan": (
        {"loss_weights": [1, math.nan, 1, 1]},
        ValueError,
        r"loss_weights: got \[1.0, nan, 1.0, 1.0\], expected finite numbers",
    ),
    "weights that are infinite": (
        {"loss_weights": torch.ones(4) / 0},
        ValueError,
        "loss_weights: got .*, expected finite numbers",
    ),
    "a seed alone": ({"seed": 3}, TypeError, r"seed: got 3, expected \(seed, step\), two integers"),
    "a seed of floats": ({"seed": (1.0, 2)}, TypeError, r"seed: got \(1.0, 2\)"),
    "a seed of three": ({"seed": (1, 2, 3)}, TypeError, r"seed: got \(1, 2, 3\)"),
    "parameters without values": (
        {"params": {0: {}, 1: {"a": {"w": [torch.zeros(2), torch.zeros(2, device="meta")]}}}},
        ValueError,
        r"params\[1\]\['a'\]\['w'\]\[1\]: got a tensor on the device meta, which has no values",
    ),
    "a batch without values": (
        {"targets": {"y": torch.zeros(8, device="meta")}},
        ValueError,
        r"targets\['y'\]: got a tensor on the device meta",
    ),
    "a state without values": (
        {"state": {0: torch.zeros(8, device="meta")}},
        ValueError,
        r"state\[0\]: got a tensor on the device meta",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("known", [False, True])
def test_wrong_arguments_are_refused_by_name(what, known):
    changes, error, told = REFUSED[what]
    with pytest.raises(error, match=told):
        read(given(**changes), read(given()) if known else None)


def test_weights_may_be_numbers_or_a_tensor():
    assert read_loss_weights(None, 3) is None
    for weights in ([1, 0.5, 0], (True, 0.5, False), torch.tensor([1.0, 0.5, 0.0])):
        assert torch.equal(read_loss_weights(weights, 3), torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64))


# -- the same form as in the last call
# ---------------------------------------------------------------------------


class Bag:
    """A class that torch alone knows as a tree."""

    def __init__(self, x, y):
        self.x, self.y = x, y


torch_pytree.register_pytree_node(Bag, lambda bag: ([bag.x, bag.y], None), lambda leaves, _: Bag(*leaves))


def test_classes_that_torch_knows_as_trees_are_trees_everywhere():
    def stage(params, x):
        y = Bag(dense({"w": params.x}, x.x), x.y + params.y)
        return pp.Output(y, metrics=Bag(y.x.sum(), y.y.sum()))

    params = {s: Bag(normal(D, D, seed=s), normal(1, seed=s)) for s in range(2)}
    inputs = Bag(normal(M * B, D, seed=2), normal(M * B, seed=3))
    step = pp.value_and_grad(
        [stage] * 2, lambda y, t: squared(y.x, t) + y.y.sum(), SCHEDULE, argnums=(0, 1), has_aux=True
    )
    for _ in range(2):
        result = step(params, inputs, normal(M * B, D, seed=4))
        aux, grads, gx = result.aux, result.grads, result.input_grads
    assert {type(tree) for tree in (aux.metrics[0], grads[0], grads[1], gx)} == {Bag}
    assert gx.x.shape == inputs.x.shape
    assert aux.metrics[1].y.shape == (M,)
    assert torch.allclose(gx.y, torch.full((M * B,), 1 / M, dtype=torch.float64))
    result = pp.jvp([stage] * 2, None, SCHEDULE, has_aux=True)(
        params, {0: None, 1: None}, inputs, input_tangents=inputs
    )
    y, ty = result.outputs, result.output_tangents
    assert type(y) is type(ty) is Bag
    assert y.x.shape == (M * B, D)


def test_a_call_of_the_same_form_reads_a_hundred_leaves_in_no_time():
    """About 0.1 ms on an idle machine; a tree that is read anew takes six times as long."""
    raw = given(params={s: {f"p{n}": torch.zeros(2, 2) for n in range(50)} for s in range(2)})
    last = read(raw)
    assert min(timeit.repeat(lambda: read(raw, last), number=5, repeat=100)) / 5 < 0.5e-3
