"""The example of three axes, run as its docstring says."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_eight_processes_train():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "8", "examples/train_3d.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", ran.stdout)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 2
