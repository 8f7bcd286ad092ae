"""Agree with the other ranks of a mesh on how the arguments of a step lie over it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch
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
    told = [json.loads(text) for text in _gather_texts(mesh, group, json.dumps(mine))]
    for name in sorted({name for theirs in told for name in theirs}):
        found = [theirs.get(name, "no DTensor") for theirs in told]
        if len(set(found)) > 1:
            axes = mesh.mesh_dim_names or range(mesh.ndim)
            listed = "; ".join(f"rank {rank} has {text}" for rank, text in enumerate(found))
            raise AgreementError(f"{name} lies over the axis {axes[axis]!r} in several ways: {listed}; give every rank the same placements")


def _gather_texts(mesh: DeviceMesh, group: dist.ProcessGroup, text: str) -> list[str]:
    """The texts of all ranks of a group, without pickle."""
    data = torch.frombuffer(bytearray(text.encode(errors="surrogatepass")), dtype=torch.uint8).to(mesh.device_type)
    sizes = [torch.zeros(1, dtype=torch.int64, device=data.device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, sizes[0].new_tensor([data.numel()]), group=group)
    longest = int(torch.stack(sizes).max())
    padded = [data.new_zeros(longest) for _ in sizes]
    dist.all_gather(padded, torch.cat([data, data.new_zeros(longest - data.numel())]), group=group)
    return [bytes(part[: int(size)].tolist()).decode(errors="surrogatepass") for part, size in zip(padded, sizes, strict=True)]


def layouts_of(form: StepForm) -> str:
    """The layouts of all DTensors, terms separated by ``"; "``."""
    return "; ".join(f"{name}: {leaf.dtype} {leaf.layout}" for name, leaf in _leaves(form) if leaf.layout is not None)


def _leaves(form: StepForm) -> Iterator[tuple[str, LeafSignature]]:
    """The leaves of all arguments, with their names."""
    trees: list[tuple[str, Signature]] = []
    for name, by_stage in (("params", form.params), ("state", form.state)):
        trees += [(f"{name}[{stage}]", signature) for stage, signature in by_stage.items()]
    rows = {"inputs": form.inputs or (), "targets": form.targets or ()} | {f"extras[{s}]": rows for s, rows in form.extras.items()}
    trees += [(f"{name}, microbatch {m}, ", signature) for name, signatures in rows.items() for m, signature in enumerate(signatures)]
    for name, signature in trees:
        yield from ((name + path, leaf) for path, leaf in zip(signature.paths, signature.leaves, strict=True))
