"""Cut a model into stages, whole or over the tensor ranks that the user lays it over."""

from collections.abc import Callable
from functools import cache
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import Module

from ppfunc._checks import shown
from ppfunc.splitter import Split, split
from ppfunc.stage.layout import layout_of
from ppfunc.stage.tree import tree_map

from .times import parameters_of

Lay = Callable[[DeviceMesh], Module]
"""``(mesh) -> module``: a copy of the model, laid over one axis of a mesh."""


class Cuts:
    """Holds a model in stages, which all candidates share.

    Args:
        model: or a split of it, whose cuts stay.
        args: its inputs, of some rows.
        lay: lays the model over tensor ranks; None without them.
    """

    def __init__(self, model: Module | Split, args: Any, lay: Lay | None) -> None:
        self._given, self._args, self._lay = model, args, lay
        self._on_paper = cache(self._lay_on_paper)
        devices = (leaf.device.type for leaf in parameters_of(model) if not leaf.is_meta)
        self.device = next(devices, "cpu")  # of a mesh
        # Torch caches what DTensors do by the names of axes, also over groups that are gone.
        self.axis = f"tensor ranks of search {uuid4()}"

    def split(self, stages: int | None, tensor: int) -> Split:
        """Split into so many stages, or into as few as there may be, whole or over tensor ranks on paper."""
        given = self._given
        parts = given if isinstance(given, Split) else split(given, self._args, at=stages or 1)
        if stages not in (None, len(parts.stages)):
            raise ValueError(f"{stages} stages, and the model was split into {len(parts.stages)}")
        return parts if tensor == 1 else split(self._on_paper(tensor), self._args, at=parts.at)

    def laid_over(self, axis: DeviceMesh, at: tuple[str, ...]) -> Split:
        """Split the model over an axis of a mesh, all ranks of which call this."""
        return split(self._laid(axis), self._args, at=at)

    def _lay_on_paper(self, tensor: int) -> Module:
        sizes = dist.get_world_size() // tensor, tensor
        mesh = init_device_mesh(self.device, sizes, mesh_dim_names=("others", self.axis))
        return self._laid(mesh[self.axis])

    def _laid(self, axis: DeviceMesh) -> Module:
        model = self._given.model if isinstance(self._given, Split) else self._given
        assert self._lay is not None
        laid = self._lay(axis)
        if laid is model or not isinstance(laid, Module) or not any(map(layout_of, laid.parameters())):
            raise TypeError(
                f"tensor: returned {shown(laid)}, expected a copy of the model with DTensors over the mesh,"
                " such as parallelize_module(copy.deepcopy(model), mesh, plan)"
                + "; the model itself is laid out now, and has to be made anew"
                * (laid is model)
            )
        untied = {names for names in _ties(model) if len(names) > 1} - _ties(laid)
        if untied:  # as parallelize_module leaves them
            raise TypeError(
                f"tensor: returned a model in which {' and '.join(min(untied))} are parameters of their own,"
                " expected one parameter, as in the model; tie them again after parallelize_module"
            )
        return laid


def _ties(model: Module) -> set[tuple[str, ...]]:
    """Return the names of each parameter."""
    names: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return set(map(tuple, names.values()))


def rows_of(tree: Any, rows: int) -> Any:
    """Return so many rows of a batch, which begin anew after the last; values other than tensors stay."""

    def taken(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf[torch.arange(rows, device=leaf.device) % len(leaf)]

    return tree_map(taken, tree)
