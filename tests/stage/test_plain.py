"""Functions that nothing differentiates, as programs."""

import torch

from ppfunc.stage.engines.tracing.plain import run_traced
from tests.models import same_bits

CALLS = []


def shifted(factor, a, b):
    CALLS.append(factor)
    return (a + b) * factor, a, torch.ones((), dtype=a.dtype)


def test_a_function_is_called_and_then_traced_for_each_form_of_its_arguments():
    CALLS.clear()
    a, b = torch.tensor(0.1), torch.tensor(0.7)
    for _ in range(4):
        total, same, one = run_traced(shifted, (3.0,), (a, b))
        assert same is a and same_bits(total, (a + b) * 3.0) and one == 1
    assert CALLS == [3.0] * 2
    one.mul_(5)  # what is returned is the caller's
    assert run_traced(shifted, (3.0,), (a, b))[2] == 1
    run_traced(shifted, (4.0,), (a, b))
    total, *_ = run_traced(shifted, (3.0,), (a.double().expand(2), b))
    assert CALLS == [3.0, 3.0, 4.0, 3.0] and total.dtype == torch.float64 and total.shape == (2,)


def test_programs_are_seen_through():
    a = torch.randn(3)
    run_traced(shifted, (2.0,), (a[0], torch.ones(())))
    mapped = torch.vmap(lambda a: run_traced(shifted, (2.0,), (a, torch.ones(()))))(a)[0]
    assert same_bits(mapped, (a + 1) * 2.0)
    slope = torch.func.grad(lambda a: run_traced(shifted, (2.0,), (a, torch.ones(())))[0])(torch.tensor(1.0))
    assert slope == 2
