"""States of stages go together over data ranks, and change between steps, as they are declared."""

import math
import re

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import ppfunc as pp
from ppfunc.training.update.update_rule import StateRule
from tests.models import BatchNormed, new_trainer, normal, squared

D, ROWS, STEPS = 4, 8, 3
REDUCE = {"*num_batches*": "sum", "*": "mean"}


def batch(step, place):
    x, target = normal(ROWS, D, seed=10 * step), normal(ROWS, D, seed=10 * step + 1)
    return x[place], target[place]


def doubled(stage, state):
    """A rule that can be told from none."""
    return {name: 2 * t if name.endswith("running_mean") else t for name, t in state.items()}


def stage_of():
    torch.manual_seed(0)
    return pp.stage_from_module(BatchNormed(D))


def normed(rank, size, shard, several):
    """The state after training on a part of each batch."""
    stage, mesh = stage_of(), init_device_mesh("cpu", (1, size), mesh_dim_names=("pp", "dp"))
    with new_trainer(
        [stage.fn], squared, pp.gpipe(1, 2), pp.optim.sgd(0.1), mesh, axes=pp.Axes("pp", "dp"), shard=shard,
        reduce_state=REDUCE, update_state=doubled, on_nonfinite="ignore" if several else "skip",
    ) as trainer:  # fmt: skip
        state = trainer.init({0: stage.params}, {0: stage.state})
        place = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
        batches = [batch(step, place) for step in range(STEPS)]
        if several:
            state, _ = trainer.steps(state, batches)
        for each in [] if several else batches:
            state, _ = trainer.step(state, *each)
    return dict(state.stage_state[0])


def apart():
    """The same by torch: each data rank goes on from one state; the changes are added, or their mean is."""
    torch.manual_seed(0)
    model = BatchNormed(D)
    optimizer, buffers = torch.optim.SGD(model.parameters(), 0.1), dict(model.named_buffers())
    for step in range(STEPS):
        optimizer.zero_grad()
        before, after = {name: t.clone() for name, t in buffers.items()}, []
        for rank in range(2):
            for name, t in before.items():
                buffers[name].copy_(t)
            for m in range(2):
                first = rank * 4 + m * 2
                x, target = batch(step, slice(first, first + 2))
                (squared(model(x), target) / 4).backward()
            after.append({name: t.clone() for name, t in buffers.items()})
        optimizer.step()
        for name, t in before.items():
            changes = sum(each[name] - t for each in after)
            t = t + (changes if "num_batches" in name else changes / 2)
            buffers[name].copy_(2 * t if name.endswith("running_mean") else t)
    return buffers


@pytest.mark.parametrize("shard", ["none", "params"])
@pytest.mark.parametrize("several", [False, True])
def test_running_statistics_are_means_and_counts_are_sums(two, shard, several):
    expected = apart()
    for found in two(normed, shard, several):
        assert found["1.num_batches_tracked"] == 4 * STEPS
        for name, t in expected.items():
            torch.testing.assert_close(found[name], t, rtol=1e-12, atol=1e-14)


def counting(p, x, state):
    """A stage that counts rows; its bias is for others to change."""
    return pp.Output(x * p["w"] + state["bias"], state={**state, "counts": state["counts"] + len(x)})


def balanced(stage, state):
    return {"bias": state["bias"] + state["counts"], "counts": torch.zeros_like(state["counts"])}


def one_leaf(stage, state):
    return state["bias"]


def in_place(stage, state):
    state["bias"] += 1
    return state


def counted(update):
    """A trainer of a stage that counts, its first state, and the state of the stage that it was given."""
    given = {"bias": torch.zeros(()), "counts": torch.zeros(())}
    trainer = new_trainer([counting], squared, pp.gpipe(1, 2), pp.optim.sgd(0.1), update_state=update)
    return trainer, trainer.init({0: {"w": torch.ones(D)}}, {0: given}), given


@pytest.mark.parametrize("update, bias, counts", [(balanced, ROWS, 0), (in_place, 1, ROWS)])
def test_a_skipped_update_and_one_in_place_leave_the_states_before(update, bias, counts):
    trainer, first, given = counted(update)
    with trainer:
        x = torch.ones(ROWS, D)
        after, _ = trainer.step(first, x, x)
        skipped, metrics = trainer.step(after, x * math.inf, x)
        assert metrics.skipped == 1 and given["bias"] == 0
        for each in (after, skipped):
            assert each.stage_state[0]["bias"] == bias and each.stage_state[0]["counts"] == counts


@pytest.mark.parametrize(
    "options, words",
    [
        ({"reduce_state": "mean"}, "reduce_state: got .* expected 'mean' or 'sum' by pattern"),
        ({"reduce_state": {"*": "max"}}, "reduce_state: got .*'max'"),
        ({"update_state": {}}, r"update_state: got .* expected a function \(stage, state\) -> state"),
    ],
)
def test_odd_arguments_are_refused(options, words):
    with pytest.raises(TypeError, match=words):
        new_trainer([counting], squared, pp.gpipe(1, 2), pp.optim.sgd(0.1), **options)


def test_ranks_tell_functions_of_one_name_apart():
    rules = [
        lambda stage, state: state,
        lambda stage, state: {},
        doubled,
    ]
    assert len({StateRule.of(None, update).text for update in rules}) == 3


def test_a_state_of_another_form_is_refused():
    trainer, first, _ = counted(one_leaf)
    words = r"update_state\(0, ...\): got .* the form of the state before"
    with trainer, pytest.raises(pp.PipelineError, match=words):
        trainer.step(first, torch.ones(ROWS, D), torch.ones(ROWS, D))


def refused(rank, size, reduce, state):
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("pp", "dp"))
    with new_trainer(
        [counting], squared, pp.gpipe(1, 2), pp.optim.sgd(0.1), mesh, axes=pp.Axes("pp", "dp"),
        reduce_state=reduce,
    ) as trainer, pytest.raises(ValueError) as told:  # fmt: skip
        trainer.init({0: {"w": torch.ones(D)}}, {0: state})
    return str(told.value)


INFINITE = "got 'counts' of stage 0, which begins with numbers that are not finite, .*, or take 'mean'"


@pytest.mark.parametrize(
    "reduce, state, words",
    [
        ("counts", {"mean": torch.zeros(2)}, "no pattern that matches 'mean' for the state of stage 0"),
        ("counts", {"counts": torch.zeros(2, dtype=torch.bool)}, "got 'counts' of torch.bool"),
        ("*", {"bias": torch.zeros(()), "counts": torch.tensor(math.inf)}, INFINITE),
        ("*", {"bias": torch.zeros(()), "counts": torch.tensor(math.nan)}, INFINITE),
    ],
    ids=["no way", "booleans", "infinity", "no number"],
)
def test_leaves_without_a_sum_are_refused(two, reduce, state, words):
    for text in two(refused, {reduce: "sum"}, state):
        assert re.search(words, text)


FAR = {
    "infinite": torch.tensor(math.inf),
    "single": torch.tensor(torch.finfo(torch.float32).max),
    "double": torch.tensor(torch.finfo(torch.float64).max, dtype=torch.float64),
    "far": torch.tensor(1e10),
    "half": torch.tensor(60000.0, dtype=torch.float16),
    "complex": torch.tensor(1e10 + 1e10j, dtype=torch.complex64),
    "long": torch.tensor(torch.iinfo(torch.int64).max),
    "small": torch.tensor(127, dtype=torch.int8),
    "unsigned": torch.tensor(255, dtype=torch.uint8),
}
COUNTS = {
    "counts_half": torch.tensor(2000.0, dtype=torch.float16),
    "counts_single": torch.tensor(16777216.0),
    "counts_long": torch.tensor(2**62),
    "counts_small": torch.tensor(-100, dtype=torch.int8),
    "counts_unsigned": torch.tensor(200, dtype=torch.uint8),
}


def least(p, x, state):
    """Replace numbers, keep others, and count."""
    seen = x.min()
    new = {name: torch.zeros_like(t) + seen.to(t.dtype) for name, t in state["least"].items()}
    counts = {name: t + (2 * seen).to(t.dtype) for name, t in state["counts"].items()}
    return pp.Output(x * p["w"], state={**state, "least": new, "counts": counts})


def from_afar(rank, size):
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("pp", "dp"))
    with new_trainer(
        [least], squared, pp.gpipe(1, 1), pp.optim.sgd(0.1), mesh, axes=pp.Axes("pp", "dp"),
        reduce_state={"counts*": "sum", "*": "mean"},
    ) as trainer:  # fmt: skip
        start = {"least": dict(FAR), "idle": dict(FAR), "counts": dict(COUNTS)}
        first = trainer.init({0: {"w": torch.ones(D)}}, {0: start})
        x = torch.full((ROWS, D), 1.0 + rank)
        after, _ = trainer.step(first, x, x)
        found = dict(after.stage_state[0])
        counts = {**found["counts"], "counts_half": torch.tensor(math.inf, dtype=torch.float16)}
        after, _ = trainer.step(after._replace(stage_state={0: {**found, "counts": counts}}), x, x)
        return found, after.stage_state[0]["counts"]["counts_half"]


def test_states_that_begin_far_from_their_numbers_are_exact(two):
    for found, overflown in two(from_afar):
        assert overflown == math.inf  # it stays so
        for name, t in FAR.items():
            middle = 1.5 if t.is_floating_point() or t.is_complex() else 1
            assert found["least"][name] == middle and found["idle"][name] == t, name
        for name, t in COUNTS.items():  # exact until it is rounded once
            assert found["counts"][name] == torch.tensor(t.item() + 6, dtype=t.dtype), name
