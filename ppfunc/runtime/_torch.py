"""Private and unstable names of torch.distributed that the transports use, each used here only.

``tests/test_torch_names.py`` says which of them another torch than 2.13 has not.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

_PROBE = 0x70706675  # a tag

# Without a registry such a communicator ends when it is let go, and peers that wait on it raise.
ProcessGroupGloo = dist.ProcessGroupGloo


def ProcessGroupNCCL(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """An NCCL communicator of its own."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def start_coalescing(group: Any) -> None:
    """Collect the operations that follow, for :func:`end_coalescing` to issue as one."""
    group._start_coalescing()


def end_coalescing(group: Any) -> Any:
    """Issue what was collected."""
    return group._end_coalescing()


def store_of(group: dist.ProcessGroup) -> Store:
    """The store through which the ranks of a group met."""
    return group.get_group_store()


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long operations of a group may take."""
    device = torch.device("cuda" if backend_of(group) == "nccl" else "cpu")
    return group._get_backend(device).options._timeout


def backend_of(group: dist.ProcessGroup) -> str | None:
    """The backend of a group for the device that computes: a group may have one for each kind of device."""
    by_device = _backends(group)
    backend = by_device.get("cuda") if torch.cuda.is_available() else None
    return backend or by_device.get("cpu") or by_device.get("cuda")


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    return dict(entry.split(":") for entry in str(dist.get_backend_config(group)).split(","))


def alive(group: dist.ProcessGroup, peer: int) -> bool:
    """Whether the process of a rank of a group may still live. Known for gloo, which has a connection to each rank.

    gloo refuses to receive over a connection that has ended. Nothing is ever sent with this tag.
    """
    if _backends(group).get("cpu") != "gloo":
        return True
    try:
        backend: Any = group._get_backend(torch.device("cpu"))
        backend.recv([torch.empty(1)], peer, _PROBE)
    except RuntimeError:
        return False
    return True
