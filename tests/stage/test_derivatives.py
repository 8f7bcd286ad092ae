"""Operators whose derivative is unknown are refused by name and line: their gradients would be zero,
silently.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.distributed.nn.functional as differentiable

from ppfunc.stage import Signature, StageError, eager, functional, graph
from tests.models import all_gather

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
        names = {"none": "Tensor", "fallthrough": "Tensor", "formula": "Tensor", "counting": "Tensor"}
        for name, result in names.items():
            library.define(f"{name}(Tensor x) -> {result}")
            made = (lambda x: x.argsort()) if name == "counting" else (lambda x: x * 2)
            library.impl(name, made, "CompositeExplicitAutograd")
        library.define("write(Tensor(a!) x) -> ()")
        library.impl("write", lambda x: [x.mul_(2)].clear(), "CompositeExplicitAutograd")
        library.impl("fallthrough", torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_autograd("ppfunc_tests::formula", lambda ctx, g: g * 2, lib=library)
        yield torch.ops.ppfunc_tests


def line_of(fn, line=1):
    return f"{os.path.abspath(__file__)}:{fn.__code__.co_firstlineno + line}"


def refused(fn, match, line=1, engine=graph):
    """The refusal names the operator and the line of the function."""
    with pytest.raises(StageError, match=match) as caught:
        engine(fn, ONES)
    assert f"called at {line_of(fn, line)}" in str(caught.value)
    return caught.value


@pytest.mark.parametrize("name", ["none", "fallthrough"])
def test_an_operator_without_a_derivative_is_refused(operators, name):
    def stage(w, x):
        return getattr(operators, name)(w * x) * w

    refused(stage, rf"ppfunc_tests\.{name}\.default, .* has no derivative, .*register_autograd.* or detach")


def test_an_operator_that_writes_without_a_derivative_is_refused(operators):
    def stage(w, x, h=None):
        h = w * x
        operators.write(h)
        return h * w

    refused(stage, r"ppfunc_tests\.write\.default, .* has no derivative", line=2)


def test_one_with_a_formula_or_without_need_of_one_is_traced(operators):
    def stage(w, x):
        order = operators.counting(w * x)
        return operators.formula(w * x)[order] + operators.none((w * x).detach()) * w

    program = graph(stage, ONES)
    y, residuals = program.forward(*ONES)
    a, b = (t.clone().requires_grad_() for t in ONES)
    product = a * b
    want = 2 * product + (2 * product.detach()) * a
    torch.testing.assert_close(y, want.detach())
    torch.testing.assert_close(
        program.backward(residuals, torch.ones(2)), torch.autograd.grad(want.sum(), (a, b))
    )


def test_no_derivative_is_needed_where_gradients_are_off(operators):
    def stage(w, x):
        with torch.no_grad():
            factor = operators.none(w * x)
        return factor * w

    program = graph(stage, ONES)
    _, residuals = program.forward(*ONES)
    torch.testing.assert_close(
        program.backward(residuals, torch.ones(2)), (2 * ONES[0] * ONES[1], torch.zeros(2))
    )


def test_a_custom_operator_without_a_formula_is_named():
    @torch.library.custom_op("ppfunc_tests_custom::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    double.register_fake(torch.empty_like)

    def stage(w, x):
        return double(w * x) * w

    refused(stage, r"cannot be traced .*ppfunc_tests_custom")


@pytest.mark.parametrize("operator", [torch.heaviside, torch.special.zeta])
def test_an_operator_of_torch_that_has_none_is_named(operator):
    def stage(w, x):
        return operator(w * x, x) * w

    refused(stage, rf"cannot be traced .*{operator.__name__.removeprefix('special_')}")


def test_collectives_that_write_are_refused(group):
    def raw(w, x, h=None):
        h = (w * x).clone()
        dist.all_reduce(h)
        return h

    for engine in (graph, functional, eager):
        refused(
            raw,
            r"the collective c10d\.allreduce_\.default, .* its gradient would be that of the identity",
            2,
            engine,
        )


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch 2.13, about its function
def test_collectives_of_torch_with_derivatives_of_their_own_are_refused(group):
    def wrapped(w, x):
        return differentiable.all_reduce(w * x)

    for engine in (graph, functional, eager):
        refused(
            wrapped,
            r"c10d\.allreduce_\.default by torch.distributed.nn.functional, .* once too often",
            1,
            engine,
        )


def test_collectives_that_write_into_detached_values_are_right_where_nothing_is_traced(group):
    def shifted(w, x):
        y = w * x
        most = y.detach().clone()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return y - most

    refused(shifted, r"the collective c10d\.allreduce_\.default, .* is not traced", 3)
    for engine in (functional, eager):
        program = engine(shifted, ONES)
        y, residuals = program.forward(*ONES)
        torch.testing.assert_close(y, torch.zeros(2))
        torch.testing.assert_close(program.backward(residuals, torch.ones(2)), (ONES[1], ONES[0]))


@pytest.mark.parametrize("engine", [functional, eager])
def test_what_depends_on_parameters_on_another_path_than_that_of_zeros_has_a_gradient(engine):
    """The path of zeros, on which outputs are learned, does not depend on ``w``: its gradient was zero on the
    other, too.
    """
    example = torch.full((2,), 3.0), Signature.of(torch.ones(2)).without_grad()
    program = engine(lambda w, x: w * x if x.sum() > 0 else x * 2, example)
    for x in (torch.ones(2), -torch.ones(2)):
        _, residuals = program.forward(example[0], x)
        torch.testing.assert_close(program.backward(residuals, torch.ones(2))[0], x.clamp(min=0))


def test_a_functional_collective_without_a_derivative_is_refused(group):
    def stage(w, x):
        return collectives.broadcast(w * x, 0, group) * w

    for engine in (graph, functional, eager):
        refused(stage, r"_c10d_functional\.broadcast\.default, .* has no derivative", 1, engine)


def test_a_functional_all_reduce_of_what_is_differentiated_is_refused_and_of_the_rest_is_right(group):
    def stage(w, x):
        return collectives.all_reduce(w * x, "sum", group) * w

    def detached(w, x):
        return collectives.all_reduce((w * x).detach(), "max", group) * w

    for engine in (graph, functional, eager):
        refused(
            stage,
            r"_c10d_functional\.all_reduce\.default, .* too large by the number of ranks .* use ppfunc.collectives.psum",  # noqa: E501
            1,
            engine,
        )
        program = engine(detached, ONES)
        y, residuals = program.forward(*ONES)
        torch.testing.assert_close(y, ONES[1])
        torch.testing.assert_close(program.backward(residuals, torch.ones(2)), (ONES[1], torch.zeros(2)))


def test_a_functional_collective_with_the_right_derivative_is_traced(group):
    program = graph(lambda w, x: all_gather(w * x, 0, group) * w, ONES)
    y, residuals = program.forward(*ONES)
    torch.testing.assert_close(y, ONES[1])
    torch.testing.assert_close(program.backward(residuals, torch.ones(2)), (2 * ONES[1], torch.ones(2)))


@pytest.mark.parametrize("factor", [2j, 1 + 2j, 3.0])
def test_complex_tensors_times_complex_numbers(factor):
    args = tuple(
        torch.randn(3, dtype=torch.complex128, generator=torch.Generator().manual_seed(n)) for n in range(2)
    )
    fn = lambda w, x: w * x * factor + factor / w  # noqa: E731
    program = graph(fn, args)
    y, residuals = program.forward(*args)
    inputs = [t.clone().requires_grad_() for t in args]
    want = fn(*inputs)
    torch.testing.assert_close(y, want.detach())
    gy = torch.ones_like(y)
    torch.testing.assert_close(program.backward(residuals, gy), torch.autograd.grad(want, inputs, gy))


def test_an_argument_may_have_the_name_of_a_keyword():
    with torch.library._scoped_library("ppfunc_keywords", "DEF") as library:
        library.define("shrink(Tensor x, *, float lambda) -> Tensor")
        library.impl("shrink", lambda x, **given: x * given["lambda"], "CompositeExplicitAutograd")

        def stage(w, x):
            return w * torch.ops.ppfunc_keywords.shrink(x.detach(), **{"lambda": 0.5})

        y, _ = graph(stage, ONES).forward(*ONES)
        torch.testing.assert_close(y, ONES[0] * ONES[1] / 2)
