"""Agree with the other ranks of a mesh on how the arguments of a step lie over it."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ppfunc.stage import LeafSignature, Signature

from .arguments import StepForm
from .errors import AgreementError


def require_same_layouts(form: StepForm) -> None:
    """Compare the layouts of all DTensors along every axis of their meshes, before anything is traced or runs.

    Every rank of such a mesh has to call it, and has DTensors on it.

    Raises:
        AgreementError: another rank lays a tensor out otherwise; on every rank of that axis.
    """
    leaves = dict(_leaves(form))
    meshes = {leaf.layout.mesh: None for leaf in leaves.values() if leaf.layout is not None}
    for mesh in filter(None, meshes):
        told = {name: f"{leaf.dtype} {leaf.layout}" for name, leaf in leaves.items() if leaf.layout and leaf.layout.mesh == mesh}
        for axis in range(mesh.ndim):
            _compare(mesh, axis, told)


def _compare(mesh: DeviceMesh, axis: int, mine: dict[str, str]) -> None:
    group = mesh.get_group(axis)
    if mesh.size(axis) == 1 or dist.get_backend(group) == "fake":  # whose ranks are this process alone
        return
    told: list[dict[str, str]] = [{}] * mesh.size(axis)
    dist.all_gather_object(told, mine, group=group)
    for name in sorted({name for theirs in told for name in theirs}):
        found = [theirs.get(name, "no DTensor") for theirs in told]
        if len(set(found)) > 1:
            axes = mesh.mesh_dim_names or range(mesh.ndim)
            listed = "; ".join(f"rank {rank} has {text}" for rank, text in enumerate(found))
            raise AgreementError(f"{name} lies over the axis {axes[axis]!r} in several ways: {listed}; give every rank the same placements")


def _leaves(form: StepForm) -> Iterator[tuple[str, LeafSignature]]:
    """The leaves of all arguments, with their names."""
    trees: list[tuple[str, Signature]] = []
    for name, by_stage in (("params", form.params), ("state", form.state)):
        trees += [(f"{name}[{stage}]", signature) for stage, signature in by_stage.items()]
    rows = {"inputs": form.inputs or (), "targets": form.targets or ()} | {f"extras[{s}]": rows for s, rows in form.extras.items()}
    trees += [(f"{name}, microbatch {m}, ", signature) for name, signatures in rows.items() for m, signature in enumerate(signatures)]
    for name, signature in trees:
        yield from ((name + path, leaf) for path, leaf in zip(signature.paths, signature.leaves, strict=True))
