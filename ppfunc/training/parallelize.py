"""Lay parameters over the ranks of a mesh: modules by torch's plans, as stages, and any trees by a rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from ppfunc.runtime.ties import leaf_names
from ppfunc.stage import ModuleStage, Signature, stage_from_module
from ppfunc.stage.layout import Boundary, MeshLayout, as_dtensor, declaring, distributed, layout_of, require_axis, with_layouts
from ppfunc.stage.module import State, further_places

Rule = Callable[[str, Tensor], Placement | Sequence[Placement] | None]
"""``(name, leaf) -> placements``, one for each axis of the mesh; None for a leaf that stays a plain tensor."""


def parallelize(
    module: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, ParallelStyle] | ParallelStyle,
    *,
    inputs: Any = None,
    outputs: Any = None,
    constants: bool = False,
    spread: bool = True,
) -> ModuleStage:
    """Make a stage of a module that torch has parallelised over one axis of a mesh.

    Equivalent to, with every parameter a DTensor outside of the stage and, where the plan says so, inside::

        torch.distributed.tensor.parallel.parallelize_module(module, mesh, plan)
        fn, params, state = ppfunc.stage_from_module(module)

    The graph engine traces through DTensors to operators on local tensors and collectives, so that a step does no more than a
    function over :func:`ppfunc.psum` and its siblings would. The eager engine runs them as they are; the functional engine, and transforms
    such as :func:`ppfunc.hvp`, cannot take torch's DTensors. Under ``loss_parallel()`` call the step within its context, with
    ``use_local_output=False`` in the plan of the head.

    Args:
        module: parallelised in place, as by torch; its values are those of the first rank of the axis.
        mesh: one axis of a mesh, such as ``mesh["tp"]``.
        plan: torch's: ``{name of a submodule: ColwiseParallel(), ...}``, or the style of the module itself.
        inputs, outputs: how the activations that the stage is given and returns are cut, as in :func:`ppfunc.with_layouts`; whole on
            every rank where none are given. Sequence parallel stages have ``Shard(1)``.
        constants, spread: as in :func:`ppfunc.stage_from_module`.

    Returns:
        ``(fn, params, state)``, as :func:`ppfunc.stage_from_module`; all parameters are DTensors, those that are not in the plan
        replicated ones.

    Raises:
        ValueError: a name in the plan is that of no submodule, or one parameter in two places is laid out in two ways.
        TypeError: not a module, or not one axis of a mesh.

    References:
        Shoeybi et al., Megatron-LM, 2019; Korthikanti et al., Reducing activation recomputation, 2022 (sequence parallel).
    """
    require_axis(mesh, "parallelize")
    if not isinstance(module, nn.Module):
        raise TypeError(f"parallelize: got {type(module).__name__}, expected a torch.nn.Module")
    _require_found(module, plan)
    shared = further_places(module, {name for name, _ in module.named_parameters()})
    parallelize_module(module, mesh, plan if isinstance(plan, ParallelStyle) else dict(plan))
    _tie_again(module, shared)
    made = stage_from_module(module, constants=constants, spread=spread)
    inside = {name: layout for name, t in (made.params | made.state).items() if (layout := layout_of(t)) is not None}
    params = {
        name: distributed(p, None if name in inside else MeshLayout.of(mesh, [Replicate()], p.shape)) for name, p in made.params.items()
    }

    def seen(tensors: State) -> State:
        return {name: as_dtensor(t, inside[name]) if name in inside else t for name, t in tensors.items()}

    @wraps(made.fn)  # which knows what is frozen
    def stage(params: State, *given: Any) -> Any:
        if given and isinstance(given[-1], dict) and made.state and given[-1].keys() == made.state.keys():
            given = (*given[:-1], seen(given[-1]))
        return made.fn(seen(params), *given)

    fn = with_layouts(stage, mesh, inputs=inputs, outputs=outputs)
    layouts = {name: layout for name, p in params.items() if (layout := layout_of(p)) is not None}
    return ModuleStage(declaring(fn, Boundary.of(fn)._replace(params=layouts)), params, made.state)


def shard(params: Any, mesh: DeviceMesh, rule: Rule) -> Any:
    """Lay the leaves of a tree over the ranks of a mesh, by a rule; every rank of the mesh calls it.

    Args:
        params: a tree of whole tensors, such as ``{stage: tree}``. The values are those of the first rank of each axis.
        mesh: of as many axes as there are placements.
        rule: ``(name, leaf) -> placements``: ``Shard(axis)`` or ``Replicate()``, or one for each axis of the mesh; None for a leaf that
            stays as it is. A name is the keys on the way to the leaf, joined by dots.

    Returns:
        The tree with DTensors, new tensors.

    Raises:
        TypeError, ValueError: the rule gives something else than placements that replicate or shard, or an axis that a leaf lacks.

    >>> import torch
    >>> shard({"w": torch.ones(2)}, None, lambda name, leaf: None)
    {'w': tensor([1., 1.])}
    """
    signature = Signature.of(params, "params")
    leaves = signature.require(params, "params")

    def laid(name: str, leaf: Tensor) -> Tensor:
        given = rule(name, leaf)
        if given is None:
            return leaf
        placements = [given] if isinstance(given, Placement) else list(given)
        if len(placements) != mesh.ndim or not all(isinstance(p, Placement) and not p.is_partial() for p in placements):
            raise TypeError(f"{name}: the rule gave {given!r}, expected {mesh.ndim} of Replicate() and Shard(axis), or None")
        if any(p.is_shard() and not -leaf.ndim <= p.dim < leaf.ndim for p in placements):  # type: ignore[attr-defined]
            raise ValueError(f"{name}: the rule gave {given!r} for a tensor of shape {list(leaf.shape)}, which lacks that axis")
        return distribute_tensor(leaf.detach(), mesh, placements).detach()

    return signature.unflatten(map(laid, leaf_names(signature), leaves))


def _require_found(module: nn.Module, plan: Any) -> None:
    """Raise where a name in the plan fits no submodule: torch would only warn."""
    names = [name.split(".") for name, _ in module.named_modules() if name]
    for path in plan if isinstance(plan, Mapping) else ():
        parts = path.split(".")
        if path and not any(len(name) == len(parts) and all(map(fnmatch, name, parts)) for name in names):
            raise ValueError(f"plan: {path!r} is the name of no submodule; the names are {', '.join('.'.join(n) for n in names[:20])}")


def _tie_again(module: nn.Module, shared: Mapping[str, str]) -> None:
    """Put one parameter back into the places that were one before the plan replaced it in each."""
    for place, first in shared.items():
        home, _, name = place.rpartition(".")
        one, other = (_find(module, path) for path in (first, place))
        if layout_of(one) != layout_of(other):
            told = " and ".join(f"{path!r} is {layout_of(t) or 'plain'}" for path, t in ((first, one), (place, other)))
            raise ValueError(f"plan: one parameter in two places is laid out in two ways, {told}; give both submodules the same")
        if one is not other and isinstance(one, nn.Parameter):
            module.get_submodule(home).register_parameter(name, one)


def _find(module: nn.Module, path: str) -> Tensor:
    home, _, name = path.rpartition(".")
    return getattr(module.get_submodule(home), name)
