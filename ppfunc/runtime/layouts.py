"""Agree with the other ranks of a mesh on how the arguments of a step lie over it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ppfunc.stage import LeafSignature, Signature

from .errors import AgreementError
from .form import StepForm


class LaidOut(NamedTuple):
    """How the DTensors among the arguments of a step lie over meshes.

    Args:
        leaves: dtype and layout, by the name of the leaf.
        digest: of all of them, equal where they are; empty where there are none.
    """

    leaves: Mapping[str, str]
    digest: str

    def __str__(self) -> str:
        return "; ".join(f"{name}: {leaf}" for name, leaf in self.leaves.items()) or "no DTensors"


def laid_out(form: StepForm) -> LaidOut:
    """How the arguments of this form lie."""
    leaves = {name: f"{leaf.dtype} {leaf.layout}" for name, leaf in _leaves(form) if leaf.layout is not None}
    return LaidOut(leaves, sha256(repr(leaves).encode()).hexdigest()[:16] if leaves else "")


def require_alike(told: Mapping[int, Mapping[str, str]], axis: str) -> None:
    """Raise AgreementError where ranks lay out a leaf in several ways.

    Args:
        told: by rank, what :class:`LaidOut` lists.
        axis: of the mesh, along which they are.
    """
    for name in sorted({name for theirs in told.values() for name in theirs}):
        found = {rank: theirs.get(name, "no DTensor") for rank, theirs in told.items()}
        if len(set(found.values())) > 1:
            listed = "; ".join(f"rank {rank} has {text}" for rank, text in found.items())
            raise AgreementError(f"{name} lies over {axis} in several ways: {listed}; give every rank the same placements")


def require_same_layouts(form: StepForm) -> None:
    """Compare the layouts of all DTensors along every axis of their meshes, over the groups of these.

    For transports that know no other rank along them. Every such rank calls it, and has DTensors there.

    Raises:
        AgreementError: another rank lays a tensor out otherwise; on every rank of that axis.
    """
    mine = json.dumps(laid_out(form).leaves)
    for mesh in {leaf.layout.mesh: None for _, leaf in _leaves(form) if leaf.layout is not None}:
        for axis in range(mesh.ndim if mesh is not None else 0):
            assert mesh is not None
            group = mesh.get_group(axis)
            if mesh.size(axis) > 1 and dist.get_backend(group) != "fake":  # all of whose ranks are this process
                told, names = map(json.loads, _gather_texts(mesh, group, mine)), mesh.mesh_dim_names
                require_alike(dict(enumerate(told)), f"the axis {names[axis]!r}" if names else f"axis {axis}")


def _gather_texts(mesh: DeviceMesh, group: dist.ProcessGroup, text: str) -> list[str]:
    """The texts of all ranks of a group, without pickle."""
    data = torch.frombuffer(bytearray(text.encode(errors="surrogatepass")), dtype=torch.uint8).to(mesh.device_type)
    sizes = [torch.zeros(1, dtype=torch.int64, device=data.device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, sizes[0].new_tensor([data.numel()]), group=group)
    longest = int(torch.stack(sizes).max())
    padded = [data.new_zeros(longest) for _ in sizes]
    dist.all_gather(padded, torch.cat([data, data.new_zeros(longest - data.numel())]), group=group)
    return [bytes(part[: int(size)].tolist()).decode(errors="surrogatepass") for part, size in zip(padded, sizes, strict=True)]


def _leaves(form: StepForm) -> Iterator[tuple[str, LeafSignature]]:
    """The leaves of all arguments, with their names."""
    trees: list[tuple[str, Signature]] = []
    for name, by_stage in (("params", form.params), ("state", form.state)):
        trees += [(f"{name}[{stage}]", signature) for stage, signature in by_stage.items()]
    rows = {"inputs": form.inputs or (), "targets": form.targets or ()} | {f"extras[{s}]": rows for s, rows in form.extras.items()}
    trees += [(f"{name}, microbatch {m}, ", signature) for name, signatures in rows.items() for m, signature in enumerate(signatures)]
    for name, signature in trees:
        yield from ((name + path, leaf) for path, leaf in zip(signature.paths, signature.leaves, strict=True))
