"""Find which ranks a transport over processes joins, and refuse wrong arguments."""

import threading
from typing import Any, get_args

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ppfunc._checks import require_one_of, require_type

from ..control.rendezvous import Rendezvous
from . import _torch
from .grid import Axes, ShardWhat, require_shardable


def pair_up(group: Any, timeout: float | None, mesh: DeviceMesh | None) -> Rendezvous | None:
    """Pair up this call with those of the other ranks; None if it cannot be known which these are.

    Each call of a rank counts, also one that is refused: else later ones would not meet.
    """
    if not dist.is_available() or not dist.is_initialized() or group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    ranks = mesh.mesh.flatten().tolist() if isinstance(mesh, DeviceMesh) else None
    if ranks is not None and dist.get_rank() not in ranks:
        return None
    shared: Any = group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD
    if (backend := _torch.backend_of(shared)) not in _torch.CARRIES:
        raise ValueError(
            f"P2P got a process group with the backend {backend!r}, it knows 'gloo' and 'nccl'; make one with"
            " torch.distributed.new_group(backend='gloo') and give it as P2P(group), or lower a trainer over"
            " 'fake' by OnPaper(mesh=mesh, axes=axes)"
        )
    return Rendezvous("ppfunc/transports", shared, timeout if _is_limit(timeout) else None, ranks)


def _is_limit(timeout: object) -> bool:
    """Tell whether this is a limit of time: None, or seconds that a lock can wait."""
    return timeout is None or (
        isinstance(timeout, int | float)
        and not isinstance(timeout, bool)
        and 0 < timeout <= threading.TIMEOUT_MAX
    )


def require_group(
    group: dist.ProcessGroup | None,
    timeout: float | None,
    mesh: DeviceMesh | None,
    axes: Axes | None,
    shard: ShardWhat,
) -> None:
    """Raise where these arguments of :class:`P2P` are wrong, or do not go together."""
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER if dist.is_available() else None  # a number, or a group
    wanted = (
        (
            "group",
            None if group is outside else group,
            dist.ProcessGroup,
            "a group, or none after init_process_group(backend) of torch; P2P(mesh=mesh) takes a mesh",
        ),
        ("mesh", mesh, DeviceMesh, "a DeviceMesh, such as torch's init_device_mesh makes"),
        ("axes", axes, Axes, "ppfunc.Axes('pp', data='dp')"),
    )
    for name, value, kind, expected in wanted:
        require_type(name, value, kind | None, expected)
    if not _is_limit(timeout):
        raise ValueError(
            f"timeout: got {timeout!r}, expected seconds, more than 0 and at most {threading.TIMEOUT_MAX:g}"
        )
    if group is not None and mesh is not None:
        raise ValueError(
            "P2P got a process group and a mesh; expected P2P(group), or P2P(mesh=mesh, axes=axes)"
        )
    if axes is not None and mesh is None:
        raise ValueError(f"axes: got {axes}, and no mesh that has them; give mesh= as well")
    require_one_of("shard", shard, get_args(ShardWhat))
    require_shardable(axes, shard)
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "P2P got no process group; call torch.distributed.init_process_group first, or use InProcess()"
        )
    if group is outside:
        raise RuntimeError(
            "P2P got a process group of which this process is not a member; call it on its ranks only"
        )
