"""The cut of a trace: exact, nothing twice, nothing of the parameters kept, every byte counted."""

from __future__ import annotations

import math
from collections import Counter

import optree
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ppfunc as pp
from ppfunc.stage import Signature, graph
from ppfunc.stage.abstract.outline import outline
from ppfunc.stage.engines.tracing import emit
from ppfunc.stage.tree import tree_leaves
from tests.stage.conftest import by_autograd, through
from tests.storages import kept_bytes

aten = torch.ops.aten
VIEWS = {
    "t", "view", "_unsafe_view", "transpose", "permute", "unbind", "expand", "unsqueeze", "select", "detach",
    "slice", "split", "reshape",
}  # fmt: skip


class Counting(TorchDispatchMode):
    """Counts the operators that compute."""

    def __init__(self):
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__.removesuffix(
            "_"
        )  # wherever the result is put, it is the same operator
        if name not in VIEWS and func.namespace == "aten":
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def parts(run):
    """Operators that each function of a program calls, and its results."""

    def parts(program, case):
        counts = {}
        leaves = tuple(tuple(tree_leaves(t)) for t in case.args[:2])
        with torch.no_grad():
            with Counting() as counts["F"]:
                y, residuals = program.flat.forward(*leaves, ())
            gy = tuple(map(torch.ones_like, y))
            with Counting() as counts["B"]:
                program.flat.backward(residuals, gy)
            with Counting() as counts["I"]:
                _, rest = program.flat.backward_input(residuals, gy)
            with Counting() as counts["W"]:
                program.flat.backward_weight(rest)
        return {k: v.calls for k, v in counts.items()}, residuals, rest

    return parts


def test_input_and_weight_gradient_are_the_backward_and_nothing_more(transformer, parts):
    case = transformer(2)
    calls, _, _ = parts(graph(case.fn, case.args), case)
    assert calls["I"] + calls["W"] == calls["B"]
    assert calls["W"]["mm"] == 2 * 4 and calls["I"]["mm"] == 2 * 4
    assert not calls["F"] & Counter({"gelu_backward": 9, "native_layer_norm_backward": 9})


def test_forward_runs_what_the_stage_runs(transformer, parts):
    case = transformer(2)
    calls, _, _ = parts(graph(case.fn, case.args), case)
    with torch.no_grad(), Counting() as plain:
        case.fn(*case.args)
    assert calls["F"] == plain.calls


def storages(tensors):
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@pytest.mark.xfail(torch.__version__ < "2.12", reason="abstractly, attention of float64 keeps float32 there")
@pytest.mark.parametrize("remat", ["none", "full", lambda op, _: "gelu" in str(op)])
def test_costs_are_the_bytes_of_the_storages_kept(transformer, remat):
    case = transformer(2)
    params, x = case.args
    step = pp.value_and_grad(
        [lambda p, x: x * p, case.fn], lambda y, _: y.sum(), pp.gpipe(2, 1), engine=graph(remat=remat)
    )
    costs = step.lower({0: torch.ones((), dtype=x.dtype), 1: params}, x, x).costs()
    assert costs.activation[1] == kept_bytes(graph(case.fn, case.args, remat=remat), params, x)


def sliced(w, x):
    """Use a view of a parameter in both forward and backward."""
    return (x @ w[:, 1:3]).sin() @ w[:2].view(2, 2, 2)[:, 0]


@pytest.mark.parametrize("kind", ["blocks", "slices"])
def test_parameters_are_kept_by_reference_and_their_views_not_at_all(transformer, parts, kind):
    case = transformer(2)
    if kind == "slices":
        case = case._replace(fn=sliced, args=(torch.randn(4, 4), torch.randn(2, 4)))
    _, residuals, rest = parts(graph(case.fn, case.args), case)
    params = {id(t) for t in optree.tree_leaves(case.args[0])}
    mine = storages(optree.tree_leaves(case.args[0]))
    assert params & set(map(id, residuals))
    for kept in (*residuals, *rest):
        assert id(kept) in params or kept.untyped_storage().data_ptr() not in mine


def test_a_stage_without_wanted_input_gradient_leaves_all_to_weights(parts):
    w, x = torch.randn(3, 3), torch.randn(2, 3)
    program = graph(lambda w, x: (x @ w).sin(), (w, Signature.of(x).without_grad()))
    _, residuals = program.flat.forward((w,), (x,), ())
    gx, rest = program.flat.backward_input(residuals, (torch.ones(2, 3),))
    assert gx == () and rest
    gw, _ = program.flat.backward(residuals, (torch.ones(2, 3),))
    assert torch.equal(program.flat.backward_weight(rest)[0], gw[0])


@pytest.mark.filterwarnings("ignore:.*nothing depends on")
def test_no_dependence_is_none_in_flat_programs():
    args = ((torch.ones(2), torch.ones(3)), (torch.ones(2), torch.ones(4)))
    program = graph(lambda p, x: p[0] * x[0], args)
    _, residuals = program.flat.forward(*args, ())
    gparams, gx = program.flat.backward(residuals, (torch.ones(2),))
    assert gparams[1] is None and gx[1] is None and gparams[0] is not None


# Rematerialisation.

REMATS = ["none", "full", lambda op, _: "gelu" in str(op) or "layer_norm" in str(op)]


@pytest.mark.parametrize("remat", REMATS)
def test_no_operator_runs_more_than_twice(transformer, parts, remat):
    case = transformer(2)
    plain, _, _ = parts(graph(case.fn, case.args), case)
    calls, _, _ = parts(graph(case.fn, case.args, remat=remat), case)
    assert calls["F"] == plain["F"]
    if remat == "full":  # W computes once more what it would get from I
        assert not calls["I"] - plain["I"] - plain["F"]
        assert not calls["W"] - plain["W"] - plain["I"] - plain["F"]
    else:
        assert calls["I"] + calls["W"] == calls["B"]
    again = calls["B"] - plain["B"]
    assert not again - plain["F"]
    assert bool(again) == (remat != "none")


@pytest.mark.parametrize("blocks", [2, 4])
def test_full_keeps_what_enters_blocks_alone(transformer, blocks):
    case = transformer(blocks)
    program = graph(case.fn, case.args, remat="full")
    assert kept_bytes(program, *case.args) == blocks * case.args[1].nbytes


def test_a_predicate_chooses_the_operators(transformer, parts):
    case = transformer(2)
    calls, _, _ = parts(
        graph(case.fn, case.args, remat=lambda op, _: op.overloadpacket is torch.ops.aten.gelu), case
    )
    assert calls["B"]["gelu"] == 2 and calls["B"]["native_layer_norm"] == 0


@pytest.mark.parametrize("remat", ["none", "full", lambda op, _: True])
def test_random_results_are_kept(remat, run):
    def fn(w, x):
        return F.dropout(F.dropout(x @ w, 0.5) @ w, 0.5).tanh()

    args = (torch.randn(16, 16), torch.randn(8, 16))
    gy = torch.randn(8, 16)

    def gradients(program):
        torch.manual_seed(3)
        _, residuals = program.forward(*args)
        state = torch.get_rng_state()
        result = program.backward(residuals, gy)
        assert torch.equal(torch.get_rng_state(), state)
        return result

    program = graph(fn, args, remat=remat)
    assert program.random
    for a, b in zip(gradients(program), gradients(graph(fn, args)), strict=True):
        assert torch.equal(a, b)


def test_what_a_stage_checkpoints_itself_is_not_kept_either(transformer, parts):
    def fn(w, x):
        return checkpoint(lambda a: (a @ w).sin().exp().sin(), x, use_reentrant=False)

    args = (torch.randn(4, 4), torch.randn(2, 4))
    program = graph(fn, args)
    assert kept_bytes(program, *args) == args[1].nbytes
    calls, _, _ = parts(program, transformer(1)._replace(fn=fn, args=args))
    assert calls["F"]["exp"] == calls["B"]["exp"] == 1


def test_an_unknown_rematerialisation_is_refused():
    for wrong, said in (
        ("some", "remat: got 'some'"),
        ({"h": "all"}, r"remat\['h'\]: got 'all'"),
        (True, "remat: got"),
        (500, "remat: got 500"),
    ):
        with pytest.raises(ValueError, match=said):
            graph(remat=wrong)  # before a stage is traced


# The first step.


def test_a_stage_is_called_once_without_values_and_once_to_be_traced(transformer):
    case, calls = transformer(2), []

    def counted(*args):
        calls.append(type(args[1]).__name__)
        return case.fn(*args)

    known = outline(counted, case.args)
    assert len(calls) == 1
    program = graph(counted, case.args, outline=known)
    assert len(calls) == 2
    y, residuals = program.forward(*case.args)
    program.backward(residuals, torch.ones_like(y))
    assert calls == ["FakeTensor"] * 2


def test_only_programs_that_run_are_written(transformer, monkeypatch):
    case, written = transformer(1), []
    write = emit.write
    monkeypatch.setattr(emit, "write", lambda recipe: written.append(recipe.title) or write(recipe))
    program = graph(case.fn, case.args)
    for _ in range(2):
        y, residuals = program.forward(*case.args)
        program.backward(residuals, torch.ones_like(y))
    assert written == ["the stage forward", "the stage backward"]


def test_a_power_of_one_in_the_derivative_of_a_square_is_left_out():
    def norm(w, x):
        y = x.pow(1.0)
        return w * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) + y.mul_(2)

    w, x, gy = torch.randn(8), torch.randn(4, 8), torch.randn(4, 8)
    program, before = graph(norm, (w, x)), x.clone()
    assert all(map(torch.equal, through(program, w, x, gy=gy), by_autograd(norm, w, x, gy=gy)))
    assert torch.equal(x, before) and "_pow_Tensor_Scalar(x0, 1.0)" not in program.flat.backward.__doc__


@pytest.mark.parametrize(
    "shape, order, axis", [((2, 4, 3, 5), (2, 0, 3, 1), 0), ((2, 3, 4, 5), (-2, 0, 1, 3), -2)]
)
def test_the_gradient_of_views_side_by_side_is_copied_once(shape, order, axis):
    def fn(w, x):
        a, b, c = (x @ w).reshape(shape).permute(order).unbind(axis)
        return a.sin() * b + c

    args = torch.randn(6, math.prod(shape[1:])), torch.randn(2, 6)
    program, gy = graph(fn, args), torch.randn(fn(*args).shape)
    assert all(map(torch.equal, through(program, *args, gy=gy), by_autograd(fn, *args, gy=gy)))
    called = [n.target for n in program.flat.backward.recipe.block.body]
    assert aten.stack.default in called and aten.clone.default not in called


def test_a_gradient_in_the_format_of_channels_last_becomes_contiguous():
    def fn(w, x):
        a, b = (x * x).reshape(2, 2, 5, 3, 4).permute(1, 0, 2, 3, 4).unbind()
        return a.permute(0, 2, 3, 1) @ w + b.permute(0, 2, 3, 1) @ w.sin()

    args = torch.randn(5, 6), torch.randn(2, 120)
    program, gy = graph(fn, args), torch.randn(fn(*args).shape)
    assert all(map(torch.equal, through(program, *args, gy=gy), by_autograd(fn, *args, gy=gy)))
    copies = [
        n.meta["val"] for n in program.flat.backward.recipe.block.body if n.target is aten.clone.default
    ]
    assert len(copies) == 1 and copies[0].is_contiguous()
