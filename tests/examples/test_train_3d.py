"""The example of three axes, run in as many processes as its docstring says."""

import re
from pathlib import Path

from tests.scripts import run_script

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_3d.py"


def test_eight_processes_train(fresh, store_port):
    assert "torchrun --nproc-per-node 8 examples/train_3d.py" in EXAMPLE.read_text()
    printed, *others = fresh(8)(run_script, store_port, EXAMPLE, timeout=200)
    assert not any(others)
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", printed)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 2
