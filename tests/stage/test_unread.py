"""A parameter on which nothing depends is named once, when a backward computes nothing for it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import ppfunc as pp
from tests.models import squared

X, SCHEDULE = torch.ones(4, 3), pp.zb_h1(ranks=2, microbatches=2)


def half(params, x):
    return x * params["used"]


def params(dtype=torch.float32):
    return {s: {"used": torch.ones(3), "spare": torch.ones(2, dtype=dtype)} for s in range(2)}


@pytest.mark.parametrize("schedule", [SCHEDULE, pp.gpipe(2, 2)], ids=lambda s: s.name)
def test_it_is_named_once(schedule):
    with pytest.warns(
        UserWarning, match=r"stage \d: nothing depends on params\['spare'\] for such inputs, so"
    ) as caught:
        step = pp.value_and_grad([half, lambda p, x: half(p, x)], squared, schedule)
        for _ in range(3):
            _, grads = step(params(), X, X)
    assert len(caught) == 2  # one for each stage
    assert grads[0]["spare"].tolist() == [0, 0]


def test_many_are_counted():
    with pytest.warns(UserWarning, match=r"params\[1\], params\[2\], params\[3\] and 2 more"):
        pp.value_and_grad([lambda p, x: x * p[0]], squared, pp.gpipe(1, 2))({0: [torch.ones(3)] * 6}, X, X)


def test_what_another_microbatch_reads_is_not_named():
    def optional(p, x):
        return x["x"] * p["used"] + (x["images"].sum() * p["spare"].sum() if "images" in x else 0)

    both = pp.Microbatches([{"x": X, "images": X}, {"x": X}])
    step = pp.value_and_grad([optional], squared, pp.gpipe(1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, grads = step({0: params()[0]}, both, pp.Microbatches([X, X]))
    assert grads[0]["spare"].all()
    with pytest.warns(UserWarning, match="leave it out where that is so for all inputs"):
        step({0: params()[0]}, pp.Microbatches([{"x": X}] * 2), pp.Microbatches([X, X]))


def test_overlapped_programs_tell_too():
    step = pp.value_and_grad([half] * 4, squared, pp.dualpipe(4, 8), overlapped=pp.interleaved())
    with pytest.warns(UserWarning, match="nothing depends on"):
        step({s: params()[0] for s in range(4)}, torch.ones(8, 3), torch.ones(8, 3))


def test_what_has_no_gradient_on_purpose_is_not_named():
    module = nn.Linear(3, 3)
    module.weight.requires_grad_(False)
    fn, own, _ = pp.stage_from_module(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pp.value_and_grad([fn] * 2, squared, SCHEDULE)(
            {0: own, 1: {k: v.clone() for k, v in own.items()}}, X, X
        )
        pp.value_and_grad([half] * 2, squared, SCHEDULE)(params(torch.int64), X, X)
        # A head for training alone, in evaluation.
        pp.evaluate([lambda p, x: half(p, x)] * 2, squared, SCHEDULE)(params(), X, X)
