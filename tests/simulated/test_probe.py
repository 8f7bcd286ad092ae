"""What the simulation needs of torch: a part that fails has moved, and other simulated tests skip."""

from __future__ import annotations

import pytest

from tests.simulated import guard, probe

pytestmark = pytest.mark.skipif(guard.missing() is not None, reason=str(guard.missing()))


@pytest.mark.parametrize("part", probe.PARTS)
def test_torch_has_what_the_simulation_needs(part):
    probe.PARTS[part]()
