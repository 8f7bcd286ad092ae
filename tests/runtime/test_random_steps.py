"""Random schedules and shapes against poison: the numbers of the model in one piece, whatever is over."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from tests import random_steps
from tests.network.simulated import Simulated

_PERTURB = -6  # M_PERTURB of glibc
_BYTE = 0x80  # what memory is filled with when it is freed; its complement, 1e306 or so, when it is allocated


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill the memory of the process when it is allocated, and when it is freed, where glibc does it."""
    option = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    filled = option(_PERTURB, _BYTE) and float(torch.empty(999, dtype=torch.float64)[9])
    assert not filled or filled > 1e300
    yield
    option(_PERTURB, 0)


def right(seed: int) -> None:
    """Run a case on ranks whose messages hold NaN until they arrive, and compare each call."""
    case = random_steps.drawn(seed)
    network = Simulated(case.schedule.ranks, seed)
    ended = network.run(lambda rank, transport: random_steps.called(case, rank, transport))
    for error in (each.error for each in ended if each.error is not None):
        raise error
    wanted = [random_steps.expected(case, call) for call in (0, 1)]
    for rank, calls in enumerate(each.value for each in ended):
        held = case.schedule.model_stages_of(rank)
        for (loss, gradients, inputs), (whole, of_stages, of_inputs) in zip(
            calls, (*wanted, wanted[0]), strict=True
        ):
            found = [loss, gradients]
            expected = [whole, {s: of_stages[s] for s in held}]
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
            if inputs is not None and len(case.schedule.flows) == 1:
                torch.testing.assert_close(
                    random_steps.rows(inputs), random_steps.rows(of_inputs), rtol=1e-9, atol=1e-11
                )


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.filterwarnings("ignore:the loss is differentiated")
def test_nothing_is_read_before_it_is_there_or_after_it_is_over(pytestconfig):
    """In three cases; with ``--large`` in ten thousand."""
    for seed in range(10_000 if pytestconfig.getoption("--large") else 3):
        try:
            right(seed)
        except Exception as error:
            error.add_note(f"seed {seed}: {random_steps.drawn(seed)!r}")
            raise
