"""Run the modules of this folder in processes of their own: the guard comes before the first backward.

So do the tests of a GPU, wherever they are. Each process takes seconds of imports, so they are few.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.clock import busy
from tests.simulated import guard

HERE = Path(__file__).parent
MODULES = sorted(p for p in HERE.glob("test_*.py") if p.name != Path(__file__).name)
SESSIONS = 2
pytestmark = pytest.mark.skipif(guard.missing() is not None, reason=str(guard.missing()))


@pytest.fixture
def run(pytestconfig):
    def session(*arguments):
        options = [o for o in ("--large", "--random") if pytestconfig.getoption(o)]
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", *options]
        limit = (2400 if "--large" in options else 240) * busy()
        done = subprocess.run(
            [*command, *map(str, arguments)],
            cwd=pytestconfig.rootpath,
            capture_output=True,
            text=True,
            timeout=limit,
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

    return session


@pytest.mark.parametrize("session", range(SESSIONS))
def test_modules_pass_on_a_simulated_accelerator(run, session):
    run(*MODULES[session::SESSIONS])


def test_the_tests_of_a_gpu_pass_on_a_simulated_one(run):
    """Except those of kernels that a CPU has not: fused recurrent layers, those that inductor writes. Of the
    kernels of attention one runs for each dtype: the simulation has one for all.
    """
    others = (p for p in HERE.parent.rglob("test_*.py") if p.parent != HERE)
    marked = [p for p in others if "mark.cuda" in p.read_text()]
    without = "recurrent or True or EFFICIENT_ATTENTION or CUDNN_ATTENTION"
    run("-p", "tests.simulated.plugin", "-m", "cuda", "-k", f"not ({without})", *marked)
