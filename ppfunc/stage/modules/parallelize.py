"""Lay parameters over the ranks of a mesh: modules by torch's plans, as stages, and any trees by a rule."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from itertools import zip_longest
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..layout import (
    Boundary,
    MeshLayout,
    declaring,
    distributed,
    gather_texts,
    layout_of,
    require_axis,
    with_layouts,
)
from ..signature import Signature, leaf_names
from .module import ModuleStage, further_places, stage_from_module

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement
    from torch.distributed.tensor.parallel import ParallelStyle

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object, in a text of it

Rule = Callable[[str, Tensor], "Placement | Sequence[Placement] | None"]
"""``(name, leaf) -> placements``, one for each axis of the mesh; None for a leaf that stays a plain
tensor.
"""


def parallelize(
    module: nn.Module,
    mesh: DeviceMesh,
    plan: "Mapping[str, ParallelStyle] | ParallelStyle",
    *,
    inputs: Any = None,
    outputs: Any = None,
    constants: bool = False,
    spread: bool = True,
) -> ModuleStage:
    """Make a stage of a module that torch has parallelised over one axis of a mesh.

    Equivalent to, with every parameter a DTensor outside of the stage and, where the plan says so, inside::

        torch.distributed.tensor.parallel.parallelize_module(module, mesh, plan)
        fn, params, state = ppfunc.stage_from_module(module)    # which a module that is laid out needs alone

    The graph engine traces through DTensors to operators on local tensors and collectives, so that a step
    does no more than a function over :func:`ppfunc.collectives.psum` and its siblings would. The eager engine
    runs them as they are. The functional engine, and transforms such as :func:`ppfunc.hvp`, cannot take
    torch's DTensors. Under ``loss_parallel()`` call the step within its context, with
    ``use_local_output=False`` in the plan of the head.

    Args:
        module: parallelised in place, as by torch; its values are those of the first rank of the axis.
        mesh: one axis of a mesh, such as ``mesh["tp"]``, all ranks of which call this.
        plan: torch's: ``{name of a submodule: ColwiseParallel(), ...}``, or the style of the module itself.
        inputs, outputs: how the activations that the stage takes and returns are cut, as in
            :func:`ppfunc.with_layouts`; whole on every rank by default. Sequence parallel stages have
            ``Shard(1)``.
        constants, spread: as in :func:`ppfunc.stage_from_module`.

    Returns:
        ``(fn, params, state)``, as :func:`ppfunc.stage_from_module`; all parameters are DTensors, those that
        are not in the plan replicated ones.

    Raises:
        ValueError: the ranks have different plans or parameters, a name in the plan is that of no submodule,
            or one parameter in two places is laid out in two ways.
        TypeError: not a module, or not one axis of a mesh.

    References:
        Shoeybi et al., Megatron-LM, 2019; Korthikanti et al., Reducing activation recomputation, 2022
        (sequence parallel).
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

    require_axis(mesh, "parallelize")
    if not isinstance(module, nn.Module):
        raise TypeError(f"parallelize: got {type(module).__name__}, expected a torch.nn.Module")
    _require_agreed(module, mesh, plan)
    _require_found(module, plan)
    shared = further_places(module, {name for name, _ in module.named_parameters()})
    parallelize_module(module, mesh, plan if isinstance(plan, ParallelStyle) else dict(plan))
    _tie_again(module, shared)
    fn, plain, state = stage_from_module(module, constants=constants, spread=spread)
    params = {
        name: distributed(p, None if layout_of(p) else MeshLayout.of(mesh, [Replicate()], p.shape))
        for name, p in plain.items()
    }
    fn = with_layouts(fn, mesh, inputs=inputs, outputs=outputs)
    layouts = {name: layout for name, p in params.items() if (layout := layout_of(p)) is not None}
    return ModuleStage(declaring(fn, Boundary.of(fn)._replace(params=layouts)), params, state)


def shard(params: Any, mesh: DeviceMesh, rule: Rule) -> Any:
    """Lay the leaves of a tree over the ranks of a mesh, by a rule; every rank of the mesh calls it.

    Args:
        params: a tree of whole tensors, such as ``{stage: tree}``. The values are those of the first rank of
            each axis.
        mesh: of as many axes as there are placements.
        rule: ``(name, leaf) -> placements``: ``Shard(axis)`` or ``Replicate()``, or one for each axis of the
            mesh; None for a leaf that stays as it is. A name is the keys on the way to the leaf, joined by
            dots.

    Returns:
        The tree with DTensors, new tensors.

    Raises:
        TypeError, ValueError: the rule gives other values than placements that replicate or shard, or an
            axis that a leaf lacks.

    >>> import torch
    >>> shard({"w": torch.ones(2)}, None, lambda name, leaf: None)
    {'w': tensor([1., 1.])}
    """
    from torch.distributed.tensor import Placement, Shard, distribute_tensor

    signature = Signature.of(params, "params")
    leaves = signature.require(params, "params")

    def laid(name: str, leaf: Tensor) -> Tensor:
        answer = rule(name, leaf)
        if answer is None:
            return leaf
        placements = [answer] if isinstance(answer, Placement) else list(answer)
        if len(placements) != mesh.ndim or not all(
            isinstance(p, Placement) and not p.is_partial() for p in placements
        ):
            raise TypeError(
                f"{name}: the rule gave {answer!r}, expected {mesh.ndim} of Replicate() and Shard(axis), or"
                " None"
            )
        if any(isinstance(p, Shard) and not -leaf.ndim <= p.dim < leaf.ndim for p in placements):
            raise ValueError(
                f"{name}: the rule gave {answer!r} for a tensor of shape {list(leaf.shape)}, which lacks that"
                " axis"
            )
        return distribute_tensor(leaf.detach(), mesh, placements).detach()

    return signature.unflatten(map(laid, leaf_names(signature), leaves))


def _require_agreed(module: nn.Module, mesh: DeviceMesh, plan: Any) -> None:
    """Raise ValueError on all ranks of the axis unless they have one plan and parameters of one form.

    Torch communicates at once for every parameter in the plan, and cannot tell whose call a message is of.
    """
    styles = plan.items() if isinstance(plan, Mapping) else [("", plan)]
    lines = [f"{path!r} as {type(style).__name__} {vars(style)}" for path, style in styles]
    lines += [f"{name} of shape {list(p.shape)}, {p.dtype}" for name, p in module.named_parameters()]
    if mesh.size() > 1 and dist.get_backend(group := mesh.get_group()) != "fake":
        mine = json.dumps([_ADDRESS.sub("", line) for line in lines])
        every = list(map(json.loads, gather_texts(mesh, group, mine)))
        for rank, theirs in enumerate(every):
            if theirs != every[0]:
                first, other = next(pair for pair in zip_longest(every[0], theirs) if len(set(pair)) > 1)
                raise ValueError(
                    f"plan: rank 0 of the axis has {first or 'nothing more'}, rank {rank} has"
                    f" {other or 'nothing more'}; give all ranks the same module and plan"
                )


def _require_found(module: nn.Module, plan: Any) -> None:
    """Raise if a name in the plan fits no submodule: torch would only warn."""
    names = [name.split(".") for name, _ in module.named_modules() if name]
    for path in plan if isinstance(plan, Mapping) else ():
        keys = path.split(".")
        if path and not any(len(name) == len(keys) and all(map(fnmatch, name, keys)) for name in names):
            raise ValueError(
                f"plan: {path!r} is the name of no submodule; the names are"
                f" {', '.join('.'.join(n) for n in names[:20])}"
            )


def _tie_again(module: nn.Module, shared: Mapping[str, str]) -> None:
    """Put one parameter back into the places that were one before the plan replaced it in each."""
    for place, first in shared.items():
        home, _, name = place.rpartition(".")
        one, other = attrgetter(first, place)(module)
        if layout_of(one) != layout_of(other):
            layouts = " and ".join(
                f"{path!r} is {layout_of(t) or 'plain'}" for path, t in ((first, one), (place, other))
            )
            raise ValueError(
                f"plan: one parameter in two places is laid out in two ways, {layouts}; give both"
                " submodules the same"
            )
        if one is not other and isinstance(one, nn.Parameter):
            module.get_submodule(home).register_parameter(name, one)
