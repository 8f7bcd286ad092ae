"""Agree with the other ranks of a mesh on how the arguments of a step lie over it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any, NamedTuple

import torch.distributed as dist

from ppfunc.stage import LeafSignature, Signature

from .arguments import StepForm
from .errors import AgreementError


class LaidOut(NamedTuple):
    """How the DTensors among the arguments of a step lie over meshes.

    Args:
        leaves: dtype and layout, by the name of the leaf.
        digest: of all of them, equal where they are; empty where there are none.
    """

    leaves: Mapping[str, str]
    digest: str

    @classmethod
    def of(cls, form: StepForm) -> LaidOut:
        """That of the arguments of this form."""
        leaves = {name: f"{leaf.dtype} {leaf.layout}" for name, leaf in _leaves(form) if leaf.layout is not None}
        return cls(leaves, sha256(repr(leaves).encode()).hexdigest()[:16] if leaves else "")


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
    for mesh in {leaf.layout.mesh: None for _, leaf in _leaves(form) if leaf.layout is not None}:
        for axis in range(mesh.ndim if mesh is not None else 0):
            assert mesh is not None
            group = mesh.get_group(axis)
            if mesh.size(axis) > 1 and dist.get_backend(group) != "fake":  # all of whose ranks are this process
                told: list[Any] = [None] * mesh.size(axis)
                dist.all_gather_object(told, LaidOut.of(form).leaves, group=group)
                names = mesh.mesh_dim_names
                require_alike(dict(enumerate(told)), f"the axis {names[axis]!r}" if names else f"axis {axis}")


def _leaves(form: StepForm) -> Iterator[tuple[str, LeafSignature]]:
    """The leaves of all arguments, with their names."""
    trees: list[tuple[str, Signature]] = []
    for name, by_stage in (("params", form.params), ("state", form.state)):
        trees += [(f"{name}[{stage}]", signature) for stage, signature in by_stage.items()]
    rows = {"inputs": form.inputs or (), "targets": form.targets or ()} | {f"extras[{s}]": rows for s, rows in form.extras.items()}
    trees += [(f"{name}, microbatch {m}, ", signature) for name, signatures in rows.items() for m, signature in enumerate(signatures)]
    for name, signature in trees:
        yield from ((name + path, leaf) for path, leaf in zip(signature.paths, signature.leaves, strict=True))
