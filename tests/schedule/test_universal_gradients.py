"""Every schedule that a builder makes computes the loss and the gradients of the sequential model."""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given, settings, strategies as st

import ppfunc as pp
from ppfunc.schedule import chimera, remove_tail, zero_bubble
from tests.builders import BUILDERS
from tests.models import affine, squared

TRAINING = {
    n: f
    for n, f in (BUILDERS | {"zero_bubble": zero_bubble, "chimera": chimera}).items()
    if "inference" not in n
}


def sequential(stages, microbatches):
    """The unpipelined model: the mean loss over the microbatches, as a function of the parameters of its
    stages.
    """

    def loss(params, inputs, targets):
        total = 0
        for x, target in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
            for stage in range(stages):
                x = affine(params[stage], x)
            total = total + squared(x, target) / microbatches
        return total

    return loss


@pytest.mark.parametrize("name", TRAINING)
@settings(max_examples=2)
@given(data=st.data())
def test_gradients_are_those_of_the_sequential_model(name, data):
    """The gradients of replicas of a stage are in the sum of the one stage of the model that they stand
    for.
    """
    build = TRAINING[name]
    p = data.draw(st.sampled_from([2, 4] if name in ("dualpipe", "chimera") else [1, 2, 3]))
    m = (
        2 * p + data.draw(st.sampled_from([0, 2]))
        if name.startswith("dualpipe")
        else 2 * data.draw(st.integers(1, 4))
    )
    chunks = (
        {"chunks": data.draw(st.integers(1, 3))} if "chunks" in inspect.signature(build).parameters else {}
    )
    schedule = remove_tail(build(p, m, **chunks))
    stages, m = len(schedule.flows[0].stages), schedule.microbatches
    normal = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=normal, dtype=torch.float64)

    params = {s: {"w": draw(3, 3), "b": draw(3)} for s in range(stages)}
    inputs, targets = draw(m * 2, 3), draw(m * 2, 3)
    expected, expected_loss = torch.func.grad_and_value(sequential(stages, m))(params, inputs, targets)
    loss, grads = pp.value_and_grad([affine] * stages, squared, schedule)(params, inputs, targets)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(grads, expected, rtol=1e-11, atol=1e-13)
