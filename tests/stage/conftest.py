"""Stages of every kind, and what their gradients must be."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppfunc.stage import eager, functional, graph, stage_from_module
from tests.models import attention_block, attention_params

W = torch.float64
ENGINES = [graph, functional, eager]
every = pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.__name__)
running = pytest.mark.parametrize("engine", [functional, eager], ids=lambda e: e.__name__)


def through(program: Any, *args: Any, gy: Any = None) -> tuple[Any, Any, Any]:
    """What a program gives: its output, and the gradients of the parameters and of ``x``."""
    y, residuals = program.forward(*args)
    return y, *program.backward(residuals, torch.ones_like(y) if gy is None else gy)


def by_autograd(fn: Callable[..., Tensor], *args: Tensor, gy: Tensor | None = None) -> tuple[Tensor, ...]:
    """The same by the tape of torch, for arguments that are tensors."""
    leaves = [t.detach().clone().requires_grad_() for t in args]
    y = fn(*leaves)
    gy = torch.ones_like(y) if gy is None else gy
    return y.detach(), *torch.autograd.grad(y, leaves, gy, materialize_grads=True)


GLOBAL = optree.registry.__GLOBAL_NAMESPACE if hasattr(optree.registry, "__GLOBAL_NAMESPACE") else ""


class Pair(NamedTuple):
    left: Any
    right: Any


class Box:
    """A node registered by its author, with a field that is no child."""

    def __init__(self, value: Any, label: str) -> None:
        self.value, self.label = value, label


optree.register_pytree_node(
    Box, lambda b: ((b.value,), b.label), lambda label, children: Box(children[0], label), namespace=GLOBAL
)


class Case(NamedTuple):
    """A stage with arguments.

    Args:
        fn: the stage.
        args: ``(params, x, *extras)``.
        has_aux: whether it returns ``(y, aux)``.
        tolerance: relative, against ``torch.func.grad``.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    has_aux: bool = False
    tolerance: float = 1e-12


def r(*shape: int, dtype: torch.dtype = W) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def in_place(w: Tensor, x: Tensor) -> Tensor:
    h = x @ w
    h.relu_()
    k = h * w[0]
    k[:, 0] += 1
    k[1:].mul_(2)
    return k


def autocast(w: Tensor, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, w).float()


def batch_norm(p: Any, x: Tensor, state: Tensor) -> Any:
    mean, var = x.mean(0), x.var(0, unbiased=False)
    return (x - mean) / (var + 1e-5).sqrt() * p, {"mean": 0.9 * state + 0.1 * mean.detach()}


def nested_params() -> Any:
    return {
        "z": [r(3, 3), None, (r(3),)],
        "a": Pair(r(3), Box(r(3, 3), "kept")),
        "n": OrderedDict(q=r(3), c=r(3)),
    }


def nested(p: Any, x: Any) -> Any:
    h = x["in"].left @ p["z"][0] + p["z"][2][0] * p["n"]["q"]
    assert p["a"].right.label == "kept"
    return Box(Pair(h @ p["a"].right.value, None), "out"), {"k": [h * p["a"].left], "ids": x["in"].right}, ()


def module_case(module: torch.nn.Module, x: Any) -> Case:
    """A module as a stage, with its buffers as state."""
    fn, params, state = stage_from_module(module.double())
    if not state:
        return Case(fn, (params, x))

    def pair(params: Any, x: Any, state: Any) -> Any:
        out = fn(params, x, state)
        return out.y, out.state

    return Case(pair, (params, x, state), True)


def cases() -> dict[str, Callable[[], Case]]:
    """Every kind of stage, made with fresh tensors."""
    t = torch.tensor
    return {
        "linear": lambda: Case(lambda w, x: x @ w, (r(3, 4), r(2, 3))),
        "block": lambda: Case(attention_block, (attention_params(), r(2, 4, 8))),
        "nested trees": lambda: Case(
            nested, (nested_params(), {"in": Pair(r(2, 3), torch.arange(4)), "un": None})
        ),
        "several tensors": lambda: Case(lambda w, x: (x[0] @ w, x[1] * x[0]), (r(3, 3), (r(2, 3), r(2, 3)))),
        "integers pass": lambda: Case(
            lambda w, x: (w[x[0]] * x[1][:, None], x[0], x[0] > 1), (r(5, 3), (t([1, 4, 0]), r(3)))
        ),
        "integer parameter": lambda: Case(
            lambda p, x: x[p["at"]] * p["w"], ({"w": r(2), "at": t([2, 0])}, r(3))
        ),
        "tokens only": lambda: Case(lambda w, x: w[x], (r(5, 3), t([[1, 4], [0, 1]]))),
        "detached parameter": lambda: Case(
            lambda p, x: x @ p["w"].detach() + p["b"], ({"w": r(3, 3), "b": r(3)}, r(2, 3))
        ),
        "unused parameter": lambda: Case(lambda p, x: x * p[0], ((r(3), r(7), t(3)), r(3))),
        "unused input": lambda: Case(lambda p, x: x[0] * p, (r(3), (r(3), r(2)))),
        "no parameters": lambda: Case(lambda p, x: x.tanh(), ((), r(3))),
        "parameter only": lambda: Case(lambda p, x: (x * p["a"], p["b"] * 2), ({"a": r(3), "b": r(2)}, r(3))),
        "parameter returned": lambda: Case(lambda p, x: (p, x + 1), (r(3), r(3))),
        "output is input": lambda: Case(lambda p, x: x, (r(2), r(3))),
        "aliased outputs": lambda: Case(
            lambda p, x: (lambda h: (h, h, h.T, h[0], h.view(-1)))(x * p), (r(3), r(2, 3))
        ),
        "constant output": lambda: Case(
            lambda p, x: (x * p, torch.ones(2, dtype=W), t([1, 2])), (r(3), r(3))
        ),
        "no gradient at all": lambda: Case(lambda p, x: (x > p).long(), (r(3), r(3))),
        "bfloat16": lambda: Case(
            lambda w, x: (x @ w).relu(),
            (r(4, 4, dtype=torch.bfloat16), r(2, 4, dtype=torch.bfloat16)),
            tolerance=0,
        ),
        "mixed dtypes": lambda: Case(
            lambda p, x: (x[0].float() @ p["w"], (x[1] * p["v"]).to(torch.bfloat16)),
            ({"w": r(3, 3, dtype=torch.float32), "v": r(3)}, (r(2, 3, dtype=torch.bfloat16), r(3))),
            tolerance=0,
        ),
        "shared inside": lambda: Case(
            lambda p, x: x @ p["w"] @ p["v"] @ p["w"], ({"w": r(3, 3), "v": r(3, 3)}, r(2, 3))
        ),
        "same object twice": lambda: (lambda w: Case(lambda p, x: x @ p[0] @ p[1].T, ((w, w), r(2, 3))))(
            r(3, 3)
        ),
        "scalars": lambda: Case(lambda p, x: x * p + p, (t(2.0, dtype=W), t(3.0, dtype=W))),
        "zero size": lambda: Case(lambda p, x: x @ p, (r(3, 2), r(0, 3))),
        "strided": lambda: Case(lambda p, x: (x.view(2, 3) @ p).T, (r(4, 3).T, r(2, 3).T)),
        "matrix as bias": lambda: Case(
            lambda p, x: torch.addmm(p[0], x, p[1].t()), ((r(2, 4), r(4, 3)), r(2, 3))
        ),
        "expanded": lambda: Case(lambda p, x: (x * p).expand(4, 2, 3), (r(3), r(1, 3).expand(2, 3))),
        "complex": lambda: Case(
            lambda p, x: ((x @ p).conj(), (x * x.conj()).real, x.abs()),
            (r(3, 3, dtype=torch.complex128), r(2, 3, dtype=torch.complex128)),
        ),
        "nn.Parameter": lambda: Case(lambda p, x: (x @ p, p), (torch.nn.Parameter(r(3, 3)), r(2, 3))),
        "in place": lambda: Case(in_place, (r(3, 3), r(4, 3))),
        "autocast": lambda: Case(
            autocast, (r(3, 3, dtype=torch.float32), r(2, 3, dtype=torch.float32)), tolerance=0
        ),
        "constants": lambda: Case(lambda p, x, mask, n: (x * p)[n] * mask, (r(3), r(2, 3), r(3), t([1, 0]))),
        "auxiliary": lambda: Case(
            lambda p, x, y: ((x @ p, (x * y).sum()), {"n": x.sum(), "m": None}),
            (r(3, 3), r(2, 3), r(3)),
            True,
        ),
        "state": lambda: Case(batch_norm, (r(3), r(5, 3), r(3)), True),
        "convolution": lambda: Case(
            lambda p, x: F.max_pool2d(F.conv2d(x, *p), 2), ((r(4, 2, 3, 3), r(4)), r(1, 2, 6, 6))
        ),
        "captured constant": lambda: (lambda c: Case(lambda p, x: x @ c @ p, (r(3, 3), r(2, 3))))(r(3, 3)),
        "second order inside": lambda: Case(
            lambda p, x: torch.func.grad(lambda a: (a @ p).sin().sum())(x), (r(3, 3), r(2, 3))
        ),
        "vmap inside": lambda: Case(lambda p, x: torch.func.vmap(lambda a: a @ p)(x), (r(3, 3), r(2, 3))),
        "strided dropout": lambda: Case(
            lambda p, x: F.dropout((x @ p).transpose(1, 2), 0.5) + F.dropout(x, 0.2)[0, 0, 0],
            (r(3, 3), r(2, 5, 3)),
        ),
        "two draws": lambda: Case(
            lambda p, x: torch.rand_like(x) * p + torch.rand_like(x) * x, (r(3), r(4, 3))
        ),
        "batch norm": lambda: module_case(
            nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()), r(2, 2, 5, 5)
        ),
        "batch norm in evaluation": lambda: module_case(nn.BatchNorm1d(3).eval(), r(4, 3)),
        "recurrent": lambda: module_case(nn.LSTM(3, 4, batch_first=True), r(2, 3, 3)),
        "encoder layer": lambda: module_case(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), r(2, 3, 8)
        ),
        "split and stack": lambda: Case(
            lambda p, x: torch.stack([a * p for a in x.chunk(2)]).unbind(1), (r(3), r(4, 3))
        ),
    }


@pytest.fixture(params=sorted(cases()))
def case(request: pytest.FixtureRequest) -> Case:
    """One stage of every kind, with fresh random tensors."""
    torch.manual_seed(0)
    return cases()[request.param]()


@pytest.fixture
def transformer() -> Callable[[int], Case]:
    """A stage of ``n`` transformer blocks in float64."""

    def make(n: int) -> Case:
        def fn(params: list[dict[str, Tensor]], x: Tensor) -> Tensor:
            for p in params:
                x = attention_block(p, x)
            return x

        return Case(fn, ([attention_params(seed=i) for i in range(n)], r(2, 4, 8)))

    return make


@dataclass(frozen=True)
class Result:
    """What a stage gives: output, auxiliary output, gradients, each a list of tensors."""

    y: list[Tensor]
    aux: list[Tensor]
    gparams: list[Tensor]
    gx: list[Tensor]

    def __eq__(self, other: object) -> bool:
        """Bitwise, NaN equal to itself."""
        assert isinstance(other, Result)
        return all(_same_bits(getattr(self, f), getattr(other, f)) for f in ("y", "aux", "gparams", "gx"))

    def close_to(self, other: Result, tolerance: float) -> None:
        for f in ("y", "aux", "gparams", "gx"):
            torch.testing.assert_close(getattr(self, f), getattr(other, f), rtol=tolerance, atol=tolerance)


def _same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(
        s.dtype == t.dtype and s.shape == t.shape and torch.equal(torch.nan_to_num(s), torch.nan_to_num(t))
        for s, t in zip(a, b, strict=True)
    )


def cotangent(leaf: Tensor) -> Tensor:
    """Random, and with strides that no stage expects."""
    generator = torch.Generator().manual_seed(leaf.numel())
    backwards = torch.randn(
        leaf.shape[::-1], generator=generator, dtype=leaf.dtype if leaf.is_complex() else W
    )
    return backwards.to(leaf.dtype).permute(tuple(range(leaf.dim() - 1, -1, -1)))


@pytest.fixture
def run() -> Callable[..., Result]:
    """Forward and backward of a case through a stage program, whole or with I and W apart."""

    def run(program: Any, case: Case, apart: bool = False) -> Result:
        torch.manual_seed(7)
        out, residuals = program.forward(*case.args)
        y, aux = out if case.has_aux else (out, None)
        gy = optree.tree_map(cotangent, y)
        if apart:
            gx, rest = program.backward_input(residuals, gy)
            gparams = program.backward_weight(rest)
        else:
            gparams, gx = program.backward(residuals, gy)
        assert optree.tree_structure(gparams) == optree.tree_structure(case.args[0])
        assert optree.tree_structure(gx) == optree.tree_structure(case.args[1])
        return Result(*map(optree.tree_leaves, (y, aux, gparams, gx)))

    return run


@pytest.fixture
def expected() -> Callable[[Case], Result]:
    """The same by ``torch.func.grad`` of the scalar product of outputs and cotangents."""

    def expected(case: Case) -> Result:
        args = optree.tree_map(lambda t: t.detach().clone(memory_format=torch.contiguous_format), case.args)
        leaves, treedef = optree.tree_flatten(args[:2])
        at = [i for i, t in enumerate(leaves) if t.is_floating_point() or t.is_complex()]

        def product(*primals: Tensor) -> Any:
            full = list(leaves)
            for i, value in zip(at, primals, strict=True):
                full[i] = value
            torch.manual_seed(7)
            out = case.fn(*optree.tree_unflatten(treedef, full), *args[2:])
            y, aux = out if case.has_aux else (out, None)
            inner = [
                (cotangent(t).conj() * t).real.sum().to(W)
                for t in optree.tree_leaves(y)
                if t.is_floating_point() or t.is_complex()
            ]
            return sum(inner, torch.zeros((), dtype=W)), (optree.tree_leaves(y), optree.tree_leaves(aux))

        primals = tuple(leaves[i] for i in at)
        argnums = tuple(range(len(at)))
        gradients, (y, aux) = torch.func.grad(product, argnums, has_aux=True)(*primals)
        full = [torch.zeros_like(t) for t in leaves]
        for i, g in zip(at, gradients, strict=True):
            full[i] = g
        count = optree.tree_structure(args[0]).num_leaves
        return Result(y, aux, full[:count], full[count:])

    return expected
