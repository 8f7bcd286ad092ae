"""Stages of modules that take a state and return the next, over slices of sequences."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ppfunc as pp
from ppfunc.schedule import insert_recomputes, seq1f1b, seq_zb
from ppfunc.stage.tree import tree_map
from tests.test_slices import ENGINES, INPUTS, SEQUENCES, TARGETS, TOKENS, WIDTH, close, cut, loss_fn, weights

STAGES = 2


class Selective(nn.Module):
    """A recurrence with gates that depend on the token, and the last inputs of a convolution."""

    def __init__(self):
        super().__init__()
        self.gates, self.mix = nn.Linear(WIDTH, 2 * WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)
        self.register_buffer("rates", torch.linspace(0.1, 1.0, WIDTH))

    def forward(self, x, state=None, *, halved=False):
        last, h = (x.new_zeros(len(x), 2, WIDTH), torch.zeros_like(x[:, 0])) if state is None else state
        whole = torch.cat((last, x), 1)
        mixed = self.mix(whole.transpose(1, 2)).transpose(1, 2)
        step, gate = self.gates(mixed).sigmoid().chunk(2, -1)
        rows = []
        for a, b in zip((-step * self.rates).exp().unbind(1), (gate * mixed).unbind(1), strict=True):
            h = a * h + b
            rows.append(h)
        return x + torch.stack(rows, 1) / (2 if halved else 1), (whole[:, -2:], h)


class Counting(Selective):
    """Also a buffer that each call writes into."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, state=None):
        self.calls += 1
        return super().forward(x, state)


MODULES = {
    "LSTM": lambda: (nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), "hx"),
    "LSTM that projects": lambda: (nn.LSTM(WIDTH, 12, proj_size=WIDTH, batch_first=True), "hx"),
    "GRU": lambda: (nn.GRU(WIDTH, WIDTH, batch_first=True, bias=False), "hx"),
    "RNN": lambda: (nn.RNN(WIDTH, WIDTH, batch_first=True), "hx"),
    "selective": lambda: (Selective(), "state"),
}


def made(name):
    """The modules of a model, alike in each call, and the name of the carry."""
    torch.manual_seed(3)
    modules = [MODULES[name]()[0].double() for _ in range(STAGES)]
    return modules, MODULES[name]()[1]


def one_piece(modules, params, first=None):
    y, last = INPUTS, {}
    for s, module in enumerate(modules):
        y, last[s] = torch.func.functional_call(module, params[s], (y, first and first[s]))
    return loss_fn(y, TARGETS), last


def rows_first(name, carry):
    """Carries of torch's modules have their rows along the second axis."""
    return tree_map(lambda t: t.transpose(0, 1), carry) if name != "selective" else carry


CASES = [
    *((name, [5, 8, 3], seq_zb, engine) for name in MODULES for engine in ENGINES),
    *(("LSTM", slices, build, "graph") for slices in (2, [1, 15], 8) for build in (seq1f1b, seq_zb)),
]


@pytest.mark.parametrize(("name", "slices", "build", "engine"), CASES)
def test_slices_give_what_the_module_gives_of_the_sequence(name, slices, build, engine):
    modules, carry = made(name)
    stages = [pp.stage_from_module(m, carry=carry, constants=True) for m in modules]
    params = {s: stage.params for s, stage in enumerate(stages)}
    step = pp.value_and_grad(
        [stage.fn for stage in stages],
        loss_fn,
        build(STAGES, SEQUENCES, len(slices) if isinstance(slices, list) else slices),
        engine=ENGINES[engine],
        loss_weights=weights(slices),
        return_carry=True,
    )
    found = step(params, *cut(slices))
    wanted, last = torch.func.grad(lambda params: one_piece(modules, params), has_aux=True)(params)
    close(found.loss, one_piece(modules, params)[0])
    close(found.grads, wanted)
    for s in range(STAGES):
        rows = pp.Microbatches([rows_first(name, c) for c in found.carry[s].trees]).join()
        close(rows, rows_first(name, last[s]))


@pytest.mark.parametrize("name", ["LSTM", "selective"])
def test_the_last_carry_is_the_first_of_the_next_step(name):
    modules, carry = made(name)
    stages = [pp.stage_from_module(m, carry=carry, constants=True) for m in modules]
    params = {s: stage.params for s, stage in enumerate(stages)}
    step = pp.value_and_grad(
        [stage.fn for stage in stages], loss_fn, seq1f1b(STAGES, SEQUENCES, 2), return_carry=True
    )
    halves = zip(*(t.split(TOKENS // 2, 1) for t in (INPUTS, TARGETS)), strict=True)
    losses, given = [], {}
    for half in halves:
        parts = [pp.microbatch(t, SEQUENCES, slices=2) for t in half]
        found = step(params, *parts, carry=given)
        losses.append(found.loss)
        given = found.carry
    close(sum(losses) / 2, one_piece(modules, params)[0])
    assert found.carry_grads.keys() == {0, 1}


def test_backpropagation_is_cut_where_the_user_detaches():
    modules, _ = made("LSTM")
    inner = [pp.stage_from_module(m, carry="hx") for m in modules]
    params = {s: stage.params for s, stage in enumerate(inner)}

    def detaching(fn):
        return lambda params, x, carry: fn(params, x, tree_map(torch.detach, carry))

    step = pp.value_and_grad(
        [detaching(stage.fn) for stage in inner], loss_fn, insert_recomputes(seq1f1b(STAGES, SEQUENCES, 4))
    )

    def truncated(params):
        total, carries = 0, [None] * STAGES
        for x, target in zip(INPUTS.chunk(4, 1), TARGETS.chunk(4, 1), strict=True):
            for s, module in enumerate(modules):
                before = tree_map(torch.detach, carries[s])
                x, carries[s] = torch.func.functional_call(module, params[s], (x, before))
            total = total + loss_fn(x, target) / 4
        return total

    loss, grads = step(params, *cut(4))
    close(loss, truncated(params))
    close(grads, torch.func.grad(truncated)(params))


def test_a_module_has_a_carry_beside_a_state_and_an_extra():
    torch.manual_seed(3)
    counting = Counting().double()
    fn, params, state = pp.stage_from_module(counting, carry="state")
    out = fn(params, INPUTS, None, state)
    again = fn(params, INPUTS, out.carry, out.state)
    assert again.state["calls"] == 2 and counting.calls == 0
    close(again.y, counting(INPUTS, out.carry)[0])
    fn, params, _ = pp.stage_from_module(Selective().double(), carry="state", constants=True)
    whole, half = (fn(params, INPUTS, None, {"halved": halved}).y - INPUTS for halved in (False, True))
    close(whole, 2 * half)


class Bare(nn.Linear):
    def forward(self, x, h=None, *, other=0, **rest):
        return {"pair": (x, h), "one": x, "none": (x, None), "three": (x, x, x)}[self.gives]


MISTAKES = {
    "backwards": (
        lambda: pp.stage_from_module(nn.LSTM(2, 2, batch_first=True, bidirectional=True), carry="hx"),
        "carry: got a bidirectional LSTM, which reads a sequence from its end too",
    ),
    "time first": (
        lambda: pp.stage_from_module(nn.GRU(2, 2), carry="hx"),
        "carry: got GRU(batch_first=False), but axis 0 has the rows of a microbatch",
    ),
    "a name that forward lacks": (
        lambda: pp.stage_from_module(nn.LSTM(2, 2), carry="state"),
        "carry: got 'state' of type str, expected a parameter of LSTM.forward after the first: hx",
    ),
    "the input": (
        lambda: pp.stage_from_module(Bare(2, 2), carry="x"),
        "Bare.forward after the first: h, other",
    ),
    "names of others": (lambda: pp.stage_from_module(Bare(2, 2), carry="rest"), "carry: got 'rest'"),
    "any name": (lambda: pp.stage_from_module(Bare(2, 2), carry="state"), "carry: got 'state'"),
    "no name": (lambda: pp.stage_from_module(Bare(2, 2), carry=True), "carry: got True"),
    "layers": (
        lambda: pp.stage_from_module(nn.Sequential(nn.LSTM(2, 2)), carry="hx"),
        "carry: got 'hx' of type str, expected a parameter of Sequential.forward after the first: none",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_names_that_take_no_carry_are_refused(mistake):
    run, told = MISTAKES[mistake]
    with pytest.raises(ValueError) as error:
        run()
    assert told in str(error.value)


@pytest.mark.parametrize("gives", ["one", "none", "three"])
def test_modules_that_return_no_carry_are_refused(gives):
    module = Bare(2, 2)
    module.gives = gives
    stage = pp.stage_from_module(module, carry="h")
    step = pp.value_and_grad([stage.fn] * STAGES, loss_fn, seq1f1b(STAGES, SEQUENCES, 4))
    with pytest.raises(pp.StageError, match=r"Bare returns .*, expected a pair \(y, next h\)"):
        step({s: tree_map(torch.clone, stage.params) for s in range(STAGES)}, *cut(4))
