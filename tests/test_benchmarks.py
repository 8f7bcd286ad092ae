"""Benchmarks start: they use parts of the package that have no other users."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "benchmarks"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(*command):
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("options", [(), ("--protection",)])
def test_the_time_of_a_step(options):
    printed = run(*TORCHRUN, "step_time.py", "--rounds", "1", "--steps", "1", "--blocks", "2", *options)
    assert "ratio" in printed


def test_all_others_are_imported():
    names = [path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("split_")]  # those need transformers
    assert len(names) > 5
    run(sys.executable, "-c", f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import {', '.join(names)}")
