"""Operators whose derivative is unknown are refused by name and line: their gradients would be zero,
silently.
"""

from __future__ import annotations

import os
import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.distributed.nn.functional as differentiable

from ppfunc.stage import Signature, StageError, eager, functional, graph
from tests.models import all_gather
from tests.stage.conftest import ENGINES, by_autograd, running, through

ONES = torch.ones(2), torch.full((2,), 3.0)


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def operators():
    """Operators of a user's library, of every kind of derivative."""
    with torch.library._scoped_library("ppfunc_tests", "DEF") as library:
        for name in ("none", "fallthrough", "formula", "counting"):
            library.define(f"{name}(Tensor x) -> Tensor")
            made = (lambda x: x.argsort()) if name == "counting" else (lambda x: x * 2)
            library.impl(name, made, "CompositeExplicitAutograd")
        library.define("write(Tensor(a!) x) -> ()")
        library.impl("write", lambda x: [x.mul_(2)].clear(), "CompositeExplicitAutograd")
        library.impl("fallthrough", torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_autograd("ppfunc_tests::formula", lambda ctx, g: g * 2, lib=library)
        yield torch.ops.ppfunc_tests


@torch.library.custom_op("ppfunc_tests_custom::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


double.register_fake(torch.empty_like)


def writes(w, x):
    h = w * x
    torch.ops.ppfunc_tests.write(h)
    return h * w


def reduced_in_place(w, x):
    h = (w * x).clone()
    dist.all_reduce(h)
    return h


def less_the_most(w, x):
    y = w * x
    most = y.detach().clone()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return y - most


def averaged(w, x):
    name = dist.group.WORLD.group_name
    made = torch.ops._c10d_functional.reduce_scatter_tensor(w * x, "avg", 1, name)
    return torch.ops._c10d_functional.wait_tensor(made)


def reduced(w, x):
    return collectives.all_reduce(w * x, "sum", dist.group.WORLD) * w


NO_FORMULA = r"ppfunc_tests\.{}\.default, .* has no derivative, .*register_autograd.* or detach"
# A stage, the line that is named, the engines that refuse it, and what they say.
REFUSED = {
    "none": (lambda w, x: torch.ops.ppfunc_tests.none(w * x) * w, 0, [graph], NO_FORMULA.format("none")),
    "fallthrough": (
        lambda w, x: torch.ops.ppfunc_tests.fallthrough(w * x) * w, 0, [graph],
        NO_FORMULA.format("fallthrough"),
    ),
    "write": (writes, 2, [graph], NO_FORMULA.format("write")),
    "custom": (lambda w, x: double(w * x) * w, 0, [graph], r"cannot be traced .*ppfunc_tests_custom"),
    "heaviside": (lambda w, x: torch.heaviside(w * x, x), 0, [graph], "cannot be traced .*heaviside"),
    "zeta": (lambda w, x: torch.special.zeta(w * x, x), 0, [graph], "cannot be traced .*zeta"),
    "in place": (
        reduced_in_place, 2, ENGINES,
        r"the collective c10d\.allreduce_\.default, .* its gradient would be that of the identity",
    ),
    "in place of detached values": (
        less_the_most, 3, [graph], r"the collective c10d\.allreduce_\.default, .* is not traced"
    ),
    "by torch.distributed.nn": (
        lambda w, x: differentiable.all_reduce(w * x), 0, ENGINES,
        r"c10d\.allreduce_\.default by torch.distributed.nn.functional, .* once too often",
    ),
    "broadcast": (
        lambda w, x: collectives.broadcast(w * x, 0, dist.group.WORLD) * w, 0, ENGINES,
        r"_c10d_functional\.broadcast\.default, .* has no derivative",
    ),
    "average": (
        averaged, 2, ENGINES,
        "reduce by 'avg'. Instead: use ppfunc.collectives.psum_scatter.* divided by the number of ranks",
    ),
    "all-reduce": (
        reduced, 1, ENGINES,
        r"_c10d_functional\.all_reduce\.default, .* too large by the number of ranks .*collectives.psum",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind, engine", [(kind, engine) for kind in REFUSED for engine in REFUSED[kind][2]])
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch 2.13, about its function
def test_a_gradient_that_would_be_wrong_is_refused_by_operator_and_line(engine, kind, operators, group):
    fn, line, _, match = REFUSED[kind]
    place = rf"called at {os.path.abspath(__file__)}:{fn.__code__.co_firstlineno + line}\D"
    with pytest.raises(StageError, match=match) as caught:
        engine(fn, ONES)
    assert re.search(place, str(caught.value))


def counted(w, x):
    operators = torch.ops.ppfunc_tests
    order = operators.counting(w * x)
    return operators.formula(w * x)[order] + operators.none((w * x).detach()) * w


def without_gradient(w, x):
    with torch.no_grad():
        factor = torch.ops.ppfunc_tests.none(w * x)
    return factor * w


SERVED = {  # stages, and what they equal
    "formula, or no need of one": (counted, lambda w, x: 2 * w * x + 2 * (w * x).detach() * w, [graph]),
    "no gradient": (without_gradient, lambda w, x: 2 * (w * x).detach() * w, [graph]),
    "in place of detached values": (
        less_the_most,
        lambda w, x: w * x - (w * x).detach(),
        [functional, eager],
    ),
    "all-reduce of detached values": (
        lambda w, x: collectives.all_reduce((w * x).detach(), "max", dist.group.WORLD) * w,
        lambda w, x: (w * x).detach() * w,
        ENGINES,
    ),
    "all-gather": (lambda w, x: all_gather(w * x, 0, dist.group.WORLD) * w, lambda w, x: w * x * w, [graph]),
}


@pytest.mark.parametrize("kind", SERVED)
def test_what_has_the_right_gradient_is_served(kind, operators, group):
    fn, same, engines = SERVED[kind]
    for engine in engines:
        torch.testing.assert_close(through(engine(fn, ONES), *ONES), by_autograd(same, *ONES))


@running
def test_what_depends_on_parameters_on_another_path_than_that_of_zeros_has_a_gradient(engine):
    """The path of zeros, on which outputs are learned, does not depend on ``w``: its gradient was zero on the
    other, too.
    """
    example = torch.full((2,), 3.0), Signature.of(torch.ones(2)).without_grad()
    program = engine(lambda w, x: w * x if x.sum() > 0 else x * 2, example)
    for x in (torch.ones(2), -torch.ones(2)):
        torch.testing.assert_close(through(program, example[0], x)[1], x.clamp(min=0))


def test_an_argument_may_have_the_name_of_a_keyword():
    with torch.library._scoped_library("ppfunc_keywords", "DEF") as library:
        library.define("shrink(Tensor x, *, float lambda) -> Tensor")
        library.impl("shrink", lambda x, **given: x * given["lambda"], "CompositeExplicitAutograd")

        def stage(w, x):
            return w * torch.ops.ppfunc_keywords.shrink(x.detach(), **{"lambda": 0.5})

        y, _ = graph(stage, ONES).forward(*ONES)
        torch.testing.assert_close(y, ONES[0] * ONES[1] / 2)
