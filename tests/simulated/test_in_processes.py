"""Run each module of this folder in a pytest of its own: the guard comes before the first backward."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.clock import busy
from tests.simulated import guard

MODULES = sorted(p for p in Path(__file__).parent.glob("test_*.py") if p.name != Path(__file__).name)


@pytest.mark.skipif(guard.missing() is not None, reason=str(guard.missing()))
@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_it_passes_on_a_simulated_accelerator(module, pytestconfig):
    options = [o for o in ("--large", "--random") if pytestconfig.getoption(o)]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", *options, str(module)]
    root = pytestconfig.rootpath
    limit = (2400 if "--large" in options else 240) * busy()
    session = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=limit)
    assert session.returncode == 0, session.stdout[-6000:] + session.stderr[-2000:]
