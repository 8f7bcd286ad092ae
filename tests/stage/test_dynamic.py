"""Programs for a range of sizes: traced once, with the bits of a trace for each size, or traced again."""

from __future__ import annotations

import math
import re
import resource
import warnings
from functools import partial, wraps
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import ppfunc as pp
from ppfunc.stage import Signature
from ppfunc.stage.program import SizeRange
from tests.models import (
    attention_block,
    attention_params,
    dense,
    dropout_stage,
    new_trainer,
    normal,
    reference,
    same_bits,
    squared,
)

# Each size is traced there, with right results.
varies = pytest.mark.xfail(
    torch.__version__ < "2.12", reason="its operators fix the sizes that they are given"
)
D = 4
DYNAMIC = pp.engines.graph(dynamic=True)
WEIGHTS = {n: {"w": normal(D, D, seed=n)} for n in (0, 1)}


def batch(length, rows=4, d=D):
    return normal(rows, length, d, seed=length), normal(rows, length, d, seed=100 + length)


def step_of(stages, engine=DYNAMIC, schedule=None, **options):
    schedule = schedule or pp.one_f_one_b(ranks=len(stages), microbatches=2)
    return pp.value_and_grad(stages, squared, schedule, pp.InProcess(), engine=engine, **options)


def traces(step):
    return step.pipeline.programs.evaluations


def require_right(result, stages, params, batches):
    expected = reference(stages, squared, params, batches)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def by_length(f):
    return lambda params, x: f(x @ params["w"], x.shape[1])


LENGTHS = 5, 9, 7, 2, 6
# What a stage does with its length; how many of LENGTHS are traced: the first, the second with symbols, and
# those for which something is decided otherwise.
STAGES = {
    "mean": (by_length(lambda x, t: x.sin() + x.mean(1, keepdim=True)), 2),
    "integer": (by_length(lambda x, t: x * t / x.numel()), 2),
    "causal": (by_length(lambda x, t: x + (x @ x.mT).tril().softmax(-1) @ x), 2),
    "halves": (by_length(lambda x, t: torch.cat([x[:, t // 2 :], x[:, : t // 2]], 1).cumsum(1)), 3),
    "reshaped": (by_length(lambda x, t: F.group_norm(x.mT.reshape(len(x), D, -1), 2).mT), 2),
    "in place": (by_length(lambda x, t: x.clone().mul_(t).sin_()), 2),
    "positions": (by_length(lambda x, t: x + (torch.arange(t) / t)[:, None]), 2),
    "branch": (by_length(lambda x, t: x.sin() if t > 6 else x.cos()), 3),
    "parity": (by_length(lambda x, t: x.sin() if t % 2 else x.cos()), 3),
    "width": (by_length(lambda x, t: x + x.mT if t == D else x), 2),
    "whole": (lambda params, x: (x @ params["w"])[:, : min(x.shape[1], 9)].sum(1, keepdim=True) + x, 2),
    "equal once": (
        by_length(
            lambda x, t: x + x[:, :1].expand(-1, 9, -1).sum(1, True) * x[:, :1].expand(-1, t, -1).sum(1, True)
        ),
        2,
    ),
    "reciprocal": (by_length(lambda x, t: x * (1.0 / t)), 5),
    "real": (by_length(lambda x, t: x / math.sqrt(t)), 5),
    "unrolled": (by_length(lambda x, t: torch.stack([x[:, n] * n for n in range(t)], 1)), 5),
}


@pytest.mark.parametrize("case", STAGES)
@varies
def test_lengths_have_the_bits_of_their_own_traces(case):
    fn, expected = STAGES[case]
    step, params = step_of([fn]), {0: WEIGHTS[0]}
    for length in (*LENGTHS, 4, 1):
        inputs, targets = batch(length)
        result = step(params, inputs, targets)
        require_right(result, [fn], params, list(zip(inputs.chunk(2), targets.chunk(2), strict=True)))
        if length == 6:
            assert traces(step) == expected
            assert same_bits(result, step_of([fn], pp.engines.graph())(params, inputs, targets))


@varies
def test_rows_and_lengths_vary_apart():
    step, params = step_of([attention_block]), {0: attention_params(8)}
    for length, rows in ((5, 4), (7, 4), (7, 8), (9, 6), (3, 12), (5, 4)):
        inputs, targets = batch(length, rows, 8)
        pairs = list(zip(inputs.chunk(2), targets.chunk(2), strict=True))
        require_right(step(params, inputs, targets), [attention_block], params, pairs)
    assert traces(step) == 3


def test_sizes_that_are_equal_once_vary_apart_and_one_is_never_among_them():
    def numbers(before, now, later):
        before, now, later = ([Signature.of(torch.empty(shape))] for shape in (before, now, later))
        return SizeRange(before, now).numbers(later)

    assert numbers((2, 5), (4, 4), (6, 8))
    assert numbers((8, 3), (9, 3), (2, 3)) and numbers((8, 3), (9, 3), (1, 3)) is None


@varies
def test_microbatches_of_one_step_have_lengths_of_their_own():
    step = step_of([dense, attention_block], schedule=pp.zb_h1(ranks=2, microbatches=4))
    params = {0: {"w": normal(8, 8)}, 1: attention_params(8)}
    for lengths in ((5, 9, 7, 6), (8, 3, 5, 30)):
        batches = [batch(length, 2, 8) for length in lengths]
        inputs, targets = map(pp.Microbatches, zip(*batches, strict=True))
        require_right(step(params, inputs, targets), [dense, attention_block], params, batches)
    assert traces(step) == 2 * 2


@varies
def test_what_is_dropped_is_that_of_a_trace_of_its_own():
    step = step_of([dropout_stage])
    results = [step({0: WEIGHTS[0]}, *batch(length), seed=(0, 1)) for length in (5, 9, 7)]
    static = step_of([dropout_stage], pp.engines.graph())
    assert same_bits(results[-1], static({0: WEIGHTS[0]}, *batch(7), seed=(0, 1)))
    assert traces(step) == 2


@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_bytes_of_a_length_are_those_of_a_trace_of_its_own(remat):
    params, schedule = {0: attention_params(8)}, pp.zb_h1(ranks=1, microbatches=2)
    dynamic, static = (
        step_of([attention_block], pp.engines.graph(remat=remat, dynamic=dynamic), schedule)
        for dynamic in (True, False)
    )
    for length in (5, 9):
        dynamic(params, *batch(length, 4, 8))
    one, two = (step.lower(params, *batch(7, 4, 8)).memory_analysis()[0] for step in (dynamic, static))
    assert [moment.most for moment in one.moments] == [moment.most for moment in two.moments]
    assert one.largest == two.largest


def test_interleaved_pairs():
    schedule, stages = pp.dualpipev(ranks=1, microbatches=2), [dense, dense]
    step = step_of(stages, schedule=schedule, overlapped=pp.interleaved())
    results = [step(WEIGHTS, *batch(length)) for length in (5, 9, 7)]
    assert same_bits(results[-1], step_of(stages, pp.engines.graph(), schedule)(WEIGHTS, *batch(7)))


NO_NUMBERS = {
    "text": (by_length(lambda x, t: x * len(str(t))), "mul.Tensor.*where its sizes are symbols"),
    "type": (by_length(lambda x, t: x.sin() if isinstance(t, int) else x.cos()), "sin.default.*cos.default"),
    "key": (by_length(lambda x, t: x * {5: 1.0, 9: 2.0, 12: 3.0}[t]), "unhashable"),
}


@pytest.mark.parametrize("case", NO_NUMBERS)
@varies
def test_a_size_that_is_used_as_anything_but_a_number_does_not_vary(case):
    fn, message = NO_NUMBERS[case]
    step = step_of([fn])
    for length in (5, 9, 12):
        inputs, targets = batch(length)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = step({0: WEIGHTS[0]}, inputs, targets)
        expected = f"for sizes that vary: .*{message}.*leave out dynamic=True"
        assert [bool(re.search(expected, str(w.message))) for w in caught] == [True] * (length == 9)
        pairs = list(zip(inputs.chunk(2), targets.chunk(2), strict=True))
        require_right(result, [fn], {0: WEIGHTS[0]}, pairs)
    assert traces(step) == 3 + 1  # with symbols once
    step({0: WEIGHTS[0]}, *batch(9))
    assert traces(step) == 3 + 1


class Longest(torch.nn.Module):
    """Lists the lengths above 6, or notes the longest."""

    def __init__(self, listed):
        super().__init__()
        self.seen, self.lengths = 0, [] if listed else None

    def forward(self, x):
        if self.lengths is None:
            self.seen = max(self.seen, x.shape[1])
        elif x.shape[1] > 6:
            self.lengths.append(x.shape[1])
        return x * max(self.seen, *(self.lengths or ()), 0)


def test_a_stage_that_lists_in_its_module_does_not_vary():
    module, alone = Longest(True), Longest(True)
    step = step_of([lambda p, x: module(x @ p["w"])])
    static = step_of([lambda p, x: alone(x @ p["w"])], pp.engines.graph())
    with pytest.warns(UserWarning, match="changes an attribute"):
        for length in (5, 9, 7, 12, 4):
            result = step({0: WEIGHTS[0]}, *batch(length))
            assert same_bits(result, static({0: WEIGHTS[0]}, *batch(length)))
    assert all(type(n) is int for n in module.lengths)


@varies
def test_a_stage_that_counts_in_its_module_is_refused():
    module = Longest(False)
    with pytest.raises(pp.StageError, match="it changes module.seen from 0"):
        step_of([lambda p, x: module(x @ p["w"])])({0: WEIGHTS[0]}, *batch(5))


@varies
def test_a_stage_that_fails_for_one_length_varies_for_others():
    def stage(params, x):
        if x.shape[1] == 9:
            raise RuntimeError("nine")
        return x @ params["w"]

    step = step_of([stage])
    step({0: WEIGHTS[0]}, *batch(5))
    with pytest.raises(pp.StageError, match="nine"):
        step({0: WEIGHTS[0]}, *batch(9))
    before = traces(step)
    for length in (7, 6, 8):
        step({0: WEIGHTS[0]}, *batch(length))
    assert traces(step) == before + 1


def test_a_stage_that_fails_for_another_length_says_so_itself():
    step = step_of([by_length(lambda x, t: x + x.new_zeros(5, D))])
    step({0: WEIGHTS[0]}, *batch(5))
    with pytest.raises(pp.StageError, match=r"length 5 at -2.*given .* x = float64\[2,9,4\]"):
        step({0: WEIGHTS[0]}, *batch(9))


def test_what_cannot_vary_is_refused():
    with pytest.raises(ValueError, match="dynamic=True"):
        pp.engines.graph(dynamic=True, compile=True)


def wrapper(fn, example, **request):
    return DYNAMIC(fn, example, **request)


@varies
def test_an_engine_that_varies_is_called_by_step_functions_alone():
    stage, example = lambda w, x: w * x, (torch.ones(2), torch.ones(2))
    for call in (lambda: pp.engines.graph(stage, example, dynamic=True), lambda: DYNAMIC(stage, example)):
        with pytest.raises(ValueError, match=r"dynamic=True. was called for one example"):
            call()
    for engine in (wrapper, partial(DYNAMIC)):
        with pytest.raises(ValueError, match="not a function that calls it"):
            step_of([dense], engine)({0: WEIGHTS[0]}, *batch(5))
    step = step_of([dense], wraps(DYNAMIC)(wrapper))  # has the mark of the engine
    for length in (5, 9, 7):
        step({0: WEIGHTS[0]}, *batch(length))
    assert traces(step) == 2


def test_a_model_that_was_split_does_not_vary():
    split = pp.split(
        torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Linear(D, D)).double(), batch(5)[:1], at=2
    )
    for engine in (DYNAMIC, [pp.engines.graph, DYNAMIC]):
        with pytest.raises(
            ValueError, match="engine.*: got graph.dynamic=True. for stages of a model .* split"
        ):
            pp.value_and_grad(split, squared, pp.one_f_one_b(2, 2), pp.InProcess(), engine=engine)
    step = pp.value_and_grad(split, squared, pp.one_f_one_b(2, 2), pp.InProcess())
    with pytest.warns(UserWarning, match="traced 8 times.*; pad batches"):
        for length in range(2, 10):
            step(split.params, *batch(length))


class Scaled(torch.autograd.Function):
    """Multiplies the gradient by a number that its forward keeps."""

    @staticmethod
    def forward(x, scale):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale, None


def differing(rank, size):
    """Data ranks of which a stage adds or multiplies by something else, or nothing else, from length 7 on."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    table, found = normal(D, seed=rank), {}
    stages = {
        "constant": by_length(lambda x, t: x + table if t > 6 else x),
        "size": by_length(lambda x, t: x * (t + 1 if rank else t) if t > 6 else x),
        "real": by_length(lambda x, t: x * (t / 2 + rank) if t > 6 else x),
        "kept": by_length(lambda x, t: Scaled.apply(x, t + rank) if t > 6 else x),
        "same": by_length(lambda x, t: x.sin() if t > 8 else Scaled.apply(x, t / 2)),
    }
    lengths = {"alike": (5, 9), "others": (5, 7 if rank else 9), "turned": (5, 9) if rank else (9, 5)}
    differ = "constant", "size", "real", "kept"
    for stage, given in [*product(differ, ["alike"]), *product(["same"], lengths)]:
        inputs, targets = map(pp.Microbatches, zip(*map(batch, lengths[given]), strict=True))
        with new_trainer(
            [stages[stage]], squared, pp.one_f_one_b(1, 2), pp.optim.sgd(1e-2), mesh,
            axes=pp.Axes("pp", data="dp"), engine=DYNAMIC,
        ) as trainer:  # fmt: skip
            state = trainer.init({0: WEIGHTS[0]})
            if stage == "same":
                assert trainer.step(state, inputs, targets)[1].loss > 0
                continue
            with pytest.raises(pp.AgreementError) as caught:
                trainer.step(state, inputs, targets)
            found[stage] = str(caught.value)
    return found


def test_programs_of_data_ranks_are_compared(two):
    for found in two(differing):
        assert found.keys() == {"constant", "size", "real", "kept"}
        assert all("stage 0 runs other programs on ranks 0 and 1" in text for text in found.values())


@varies
def test_many_lengths_are_no_reason_to_warn_unless_each_is_traced():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = step_of([STAGES["mean"][0]])
        for length in range(2, 40):
            step({0: WEIGHTS[0]}, *batch(length))
    assert traces(step) == 2
    step = step_of([STAGES["real"][0]])
    with pytest.warns(UserWarning, match="traced 8 times.*; pad batches"):
        for length in range(2, 10):
            step({0: WEIGHTS[0]}, *batch(length))


@pytest.mark.large
def test_three_hundred_lengths():
    step = step_of([attention_block] * 2, schedule=pp.zb_h1(ranks=2, microbatches=4))
    params = {n: attention_params(16, n) for n in (0, 1)}
    resident = []
    for length in torch.randperm(400, generator=torch.Generator().manual_seed(0))[:300].add(2).tolist():
        inputs, targets = batch(length, 8, 16)
        result = step(params, inputs, targets)
        pairs = list(zip(inputs.chunk(4), targets.chunk(4), strict=True))
        expected = reference([attention_block] * 2, squared, params, pairs)
        torch.testing.assert_close(result, expected, rtol=1e-11, atol=1e-11)
        resident.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert traces(step) == 2 * 2
    assert resident[-1] - resident[99] < 16 << 10  # KiB: allocators breathe
