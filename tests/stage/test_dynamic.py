"""Programs for a range of sizes: traced once, with the bits of a trace for each size, or traced again."""

from __future__ import annotations

import math
import resource
import warnings

import pytest
import torch
import torch.nn.functional as F

import ppfunc as pp
from tests.models import (
    attention_block,
    attention_params,
    dense,
    dropout_stage,
    normal,
    reference,
    same_bits,
    squared,
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
    return step._compiled._pipeline.programs.evaluations


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


def test_rows_and_lengths_vary_apart():
    step, params = step_of([attention_block]), {0: attention_params(8)}
    for length, rows in ((5, 4), (7, 4), (7, 8), (9, 6), (3, 12), (5, 4)):
        inputs, targets = batch(length, rows, 8)
        pairs = list(zip(inputs.chunk(2), targets.chunk(2), strict=True))
        require_right(step(params, inputs, targets), [attention_block], params, pairs)
    assert traces(step) == 3


def test_microbatches_of_one_step_have_lengths_of_their_own():
    step = step_of([dense, attention_block], schedule=pp.zb_h1(ranks=2, microbatches=4))
    params = {0: {"w": normal(8, 8)}, 1: attention_params(8)}
    for lengths in ((5, 9, 7, 6), (8, 3, 5, 30)):
        batches = [batch(length, 2, 8) for length in lengths]
        inputs, targets = map(pp.Microbatches, zip(*batches, strict=True))
        require_right(step(params, inputs, targets), [dense, attention_block], params, batches)
    assert traces(step) == 2 * 2


def test_what_is_dropped_is_that_of_a_trace_of_its_own():
    step = step_of([dropout_stage])
    results = [step({0: WEIGHTS[0]}, *batch(length), seed=(0, 1)) for length in (5, 9, 7)]
    static = step_of([dropout_stage], pp.engines.graph())
    assert same_bits(results[-1], static({0: WEIGHTS[0]}, *batch(7), seed=(0, 1)))
    assert traces(step) == 2


@pytest.mark.parametrize("remat", ["none", "full", 4000])
def test_the_bytes_of_a_length_are_those_of_a_trace_of_its_own(remat):
    params, schedule = {0: attention_params(8)}, pp.zb_h1(ranks=1, microbatches=2)
    dynamic, static = (
        step_of([attention_block], pp.engines.graph(remat=remat, dynamic=dynamic), schedule)
        for dynamic in (True, False)
    )
    for length in (5, 9):
        dynamic(params, *batch(length, 4, 8))
    one, two = (step.lower(params, *batch(7, 4, 8)).memory_analysis()[0] for step in (dynamic, static))
    assert one.by_instruction == two.by_instruction
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
def test_a_size_that_is_used_as_anything_but_a_number_does_not_vary(case):
    fn, message = NO_NUMBERS[case]
    step = step_of([fn])
    step({0: WEIGHTS[0]}, *batch(5))
    for length in (9, 12):
        inputs, targets = batch(length)
        with pytest.warns(UserWarning, match=f"for sizes that vary: .*{message}.*leave out dynamic=True"):
            result = step({0: WEIGHTS[0]}, inputs, targets)
        pairs = list(zip(inputs.chunk(2), targets.chunk(2), strict=True))
        require_right(result, [fn], {0: WEIGHTS[0]}, pairs)


def test_a_stage_that_fails_for_another_length_says_so_itself():
    step = step_of([by_length(lambda x, t: x + x.new_zeros(5, D))])
    step({0: WEIGHTS[0]}, *batch(5))
    with pytest.raises(pp.StageError, match=r"length 5 at -2.*given .* x = float64\[2,9,4\]"):
        step({0: WEIGHTS[0]}, *batch(9))


def test_what_cannot_vary_is_refused():
    for options in ({"compile": True}, {"cuda_graphs": True}):
        with pytest.raises(ValueError, match="dynamic=True"):
            pp.engines.graph(dynamic=True, **options)
    with pytest.raises(ValueError, match="dynamic=True. and a loss_engine"):
        step_of([dense], loss_engine=pp.engines.eager)
    with pytest.raises(ValueError, match="dynamic=True for one example"):
        pp.engines.graph(lambda w, x: w * x, (torch.ones(2), torch.ones(2)), dynamic=True)


def test_many_lengths_are_no_reason_to_warn_unless_each_is_traced():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = step_of([STAGES["mean"][0]])
        for length in range(2, 40):
            step({0: WEIGHTS[0]}, *batch(length))
    assert traces(step) == 2
    step = step_of([STAGES["real"][0]])
    with pytest.warns(UserWarning, match="traced 8 times"):
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
