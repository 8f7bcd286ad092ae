"""The example of three axes, run in as many processes as its docstring says."""

import io
import os
import re
import runpy
from contextlib import redirect_stdout
from pathlib import Path

import torch.distributed as dist

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_3d.py"


def run_example(rank, size, port):
    """Return what a rank prints; it begins as a process of torchrun does, without a process group."""
    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLE))
    return printed.getvalue()


def test_eight_processes_train(fresh, free_port):
    assert "torchrun --nproc-per-node 8 examples/train_3d.py" in EXAMPLE.read_text()
    printed, *others = fresh(8)(run_example, free_port, timeout=200)
    assert not any(others)
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", printed)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 2
