"""Processes that begin with what all of them need imported."""

from __future__ import annotations

from typing import Any

import torch.multiprocessing as mp


def forked() -> Any:
    """The context of a server that imports once, and forks each process."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(
        ["pytest", "hypothesis", "torch._dynamo", "ppfunc.training.trainer", "ppfunc.steps"]
    )
    return context
