"""Every name of the package is there, and only what is used is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ppfunc.parallel


def test_every_name_is_there():
    for name in ppfunc.parallel.__all__:
        assert getattr(ppfunc.parallel, name) is not None
    assert dir(ppfunc.parallel) == ppfunc.parallel.__all__
    with pytest.raises(
        AttributeError, match="has no attribute 'partition_balance'; did you mean 'partition_balanced'"
    ):
        _ = ppfunc.parallel.partition_balance


def test_a_placement_loads_nothing_else():
    program = (
        "import sys, ppfunc.parallel.topology; sys.exit('fractions' in sys.modules or 'difflib' in"
        " sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
