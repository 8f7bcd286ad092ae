"""Random schedules and shapes on a device whose memory is NaN at first, and poisoned when it is freed."""

import pytest
import torch

from tests import random_steps


@pytest.mark.filterwarnings("ignore:the loss is differentiated")
def test_memory_is_read_while_it_holds_what_is_read(simulate, pytestconfig):
    """In one case, whose residuals move to the host and back; with ``--large`` in three hundred."""
    for seed in range(300) if pytestconfig.getoption("--large") else [4]:
        case = random_steps.drawn(seed, engines=[*random_steps.GRAPHS])
        simulate(seed=seed)
        calls = random_steps.called(case, None, None, torch.Tensor.cuda)
        wanted = [random_steps.expected(case, call) for call in (0, 1)]
        for (loss, gradients, inputs), (whole, of_stages, of_inputs) in zip(
            calls, (*wanted, wanted[0]), strict=True
        ):
            found, expected = [loss, gradients], [whole, of_stages]
            if inputs is not None:
                found.append(random_steps.rows(inputs))
                expected.append(random_steps.rows(of_inputs))
            torch.testing.assert_close(
                found, expected, rtol=1e-9, atol=1e-11, msg=lambda text, case=case: f"{text}\n{case!r}"
            )
