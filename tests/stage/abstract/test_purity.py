"""Effects of stages are refused before they happen, whichever path a stage takes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ppfunc.stage import StageError, eager, functional
from tests.stage.conftest import every, running, through

KEPT = torch.zeros(2)
STATISTICS = torch.zeros(2), torch.ones(2)

EFFECTS = {
    "data of a parameter": (lambda p, x: p["a"].data.add_(1), r"its argument params\['a'\]"),
    "detached parameter": (lambda p, x: p["a"].detach().add_(1), r"its argument params\['a'\]"),
    "view of a parameter": (lambda p, x: p["a"].data[:1].view(1, 1).fill_(3), r"its argument params\['a'\]"),
    "input": (lambda p, x: x.detach().mul_(2), "its argument x"),
    "list of parameters": (
        lambda p, x: torch._foreach_add_([x.detach() * 2, p["a"].detach()], 1),
        r"its argument params\['a'\]",
    ),
    "output of a parameter": (
        lambda p, x: torch.add(p["a"].detach(), 1, out=p["a"].detach()),
        r"its argument params\['a'\]",
    ),
    "captured tensor": (
        lambda p, x: KEPT.add_(1),
        r"a tensor of shape \(2,\) that is not among its arguments",
    ),
    "view of a captured tensor": (
        lambda p, x: KEPT.view(2, 1)[0].add_(1),
        r"a tensor of shape \(1,\) that is not among",
    ),
    "output of a captured tensor": (
        lambda p, x: torch.add(KEPT, x.detach(), out=KEPT),
        r"a tensor of shape \(2,\) that is not among its arguments",
    ),
    "captured running statistics": (
        lambda p, x: F.batch_norm(torch.stack([x.detach(), x.detach()]), *STATISTICS, training=True),
        r"a tensor of shape \(2,\) that is not among its arguments",
    ),
}


@pytest.fixture
def args():
    KEPT.zero_()
    STATISTICS[0].zero_()
    return {"a": torch.ones(2), "b": torch.ones(2)}, torch.ones(2)


def as_before(args):
    return all(torch.equal(t, torch.ones(2)) for t in (*args[0].values(), args[1])) and not (
        KEPT.any() or STATISTICS[0].any()
    )


@every
@pytest.mark.parametrize("kind", EFFECTS)
def test_an_effect_of_every_call_is_refused_when_the_stage_is_evaluated(engine, kind, args):
    effect, place = EFFECTS[kind]

    def fn(p, x):
        effect(p, x)
        return x * p["a"] * p["b"]

    with pytest.raises(StageError, match=f"^stage 1: it is not pure: it writes into {place}") as caught:
        engine(fn, args, name="stage 1")
    assert "engine" not in caught.value.instead
    assert as_before(args)


@running
@pytest.mark.parametrize("kind", EFFECTS)
def test_an_effect_behind_a_condition_is_refused_before_it_happens(engine, kind, args):
    effect, place = EFFECTS[kind]

    def fn(p, x):
        if x.sum() > 0:
            effect(p, x)
        return x * p["a"] * p["b"]

    program = engine(fn, (args[0], torch.zeros(2)), name="stage 1")
    # the second by torch.func
    refusals = f"stage 1: it is not pure: it writes into {place}|would mutate a captured Tensor"
    with pytest.raises((StageError, RuntimeError), match=refusals):
        program.forward(*args)
    assert as_before(args)


@running
def test_what_a_stage_writes_into_its_own_tensors_is_no_effect(engine):
    def fn(w, x):
        own = [torch.tensor([1.0, 2.0]), torch.empty(2), torch.zeros(4)[:2], x.clone()]
        for t in own:
            t.copy_(x)
        h = (x * w).view(2, 1)
        h[0].add_(1)
        return h.squeeze(1).relu_() + sum(own) if x.sum() > 0 else h.squeeze(1)

    args = torch.full((2,), 3.0), torch.ones(2)
    y, gw, _ = through(engine(fn, args), *args)
    assert torch.equal(y, torch.tensor([8.0, 7.0])) and torch.equal(gw, torch.ones(2))


def test_numpy_may_be_written_into():
    def fn(w, x):
        kept = torch.from_numpy(x.detach().numpy() * 2)
        kept.add_(1)
        return x * w * kept

    program = eager(fn, (torch.ones(2), torch.ones(2)))
    assert torch.equal(program.forward(torch.ones(2), torch.ones(2))[0], torch.full((2,), 3.0))


@running
def test_a_write_that_no_evaluation_shows_is_told_afterwards(engine):
    calls = []

    def fn(w, x):
        calls.append(None)
        if len(calls) > 3:
            w["a"].detach().add_(1)
        return x * w["a"]

    args = {"a": torch.ones(2)}, torch.ones(2)
    program = engine(fn, args, name="stage 1")
    with pytest.raises(
        StageError, match=r"stage 1: it is not pure: it has written into its argument params\['a'\]"
    ):
        for _ in range(4):
            program.forward(*args)


def test_inference_tensors_have_no_count_of_writes():
    with torch.inference_mode():
        args = torch.ones(2), torch.ones(2)
    program = functional(lambda w, x: x + w, (torch.ones(2), torch.ones(2)))
    assert torch.equal(program.forward(*args)[0], torch.full((2,), 2.0))


@running
def test_a_captured_parameter_behind_a_condition_is_refused(engine):
    weight = torch.nn.Parameter(torch.ones(2))
    program = engine(lambda w, x: x * (weight if x.sum() > 0 else w), (torch.ones(2), torch.zeros(2)))
    with pytest.raises(StageError, match="it reads a tensor .* requires a gradient, which would be lost"):
        program.forward(torch.ones(2), torch.ones(2))
