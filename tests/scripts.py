"""Run scripts as torchrun does, in processes that have imported torch already."""

from __future__ import annotations

import io
import os
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist


def run_script(rank: int, size: int, port: int, path: Path, *options: str) -> str:
    """Run a script that makes the process group itself, over a store that is there; return what it prints."""
    if dist.is_initialized():
        dist.destroy_process_group()
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    os.environ |= {name: str(value) for name, value in place.items()}
    beside = [str(path.parent), *sys.path]
    with (
        patch.object(sys, "argv", [str(path), *options]),
        patch.object(sys, "path", beside),
        redirect_stdout(io.StringIO()) as printed,
    ):
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()
