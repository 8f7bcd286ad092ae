"""Make the parameters of this rank of a model on the device meta, with the same numbers in any grid."""

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from ppfunc._checks import require_type
from ppfunc.schedule import Schedule
from ppfunc.stage._torch import version
from ppfunc.stage.process import process_lock

from . import Split

Init = Callable[[str, Tensor, torch.Generator], object]
Tied = Mapping[str, Sequence[tuple[int, str]]]


def materialize(
    stages: Sequence[nn.Module | None] | Split,
    schedule: Schedule | None = None,
    mesh: DeviceMesh | None = None,
    seed: int = 0,
    *,
    pipe: str = "pp",
    names: Callable[[int, str], str] | None = None,
    tied: Tied | None = None,
    like: Mapping[int, Mapping[str, Tensor]] | None = None,
    init: Init | None = None,
    device: torch.device | str | None = None,
) -> dict[int, dict[str, Tensor]]:
    """Make the parameters of the stages of this rank, one module after the other.

    Only these parameters, and the module at work, are ever allocated.

    Equivalent to, for each module of the model that has parameters of its own::

        torch.manual_seed(hash of (seed, name of the module))
        module.reset_parameters(); model._init_weights(module)    # those of the two that exist

    Numbers are drawn on the CPU. They depend on the seed and the name alone: not on the grid, on the device,
    or on the other parameters. A leaf that is a DTensor, as ``parallelize_module`` makes them on meta too,
    becomes this rank's slice of the whole. Parameters that are not on meta are returned as they are.

    Args:
        stages: modules, one per stage of the model, None for those of other processes; or a split of a model.
        schedule: says which stages are those of this rank; all of them by default.
        mesh: with the axis ``pipe``; one process has all stages by default.
        seed: of all numbers.
        pipe: name of the axis of pipeline ranks.
        names: from a stage and a name in its module to the name in the whole model, such as
            ``layers.3.weight``, so that other cuts of the model give the same numbers; by default
            ``3.weight`` of stage 0 is ``0.3.weight``. A split knows its names.
        tied: ``{name: ((stage, name), ...)}``, places that hold the same parameter; it is made as at the
            first. A split knows its own.
        like: ``{stage: {name: tensor}}`` whose layouts over a mesh the leaves get, such as the ``params`` of
            stages that :func:`parallelize` has made on meta; by default those of the parameters of the
            modules.
        init: ``init(name, tensor, generator)`` fills a leaf in place, or leaves it to the module by not
            writing.
        device: of the leaves; by default that of the mesh, or the CPU.

    Returns:
        ``{stage: {name: tensor}}`` of the stages of the model that this rank runs.

    Raises:
        ValueError: nothing writes a parameter; a buffer on meta, which no seed can give values; no such axis;
            a schedule for another number of ranks or stages.

    >>> with torch.device("meta"):
    ...     stages = [nn.Linear(2, 3), nn.Linear(3, 1)]
    >>> params = materialize(stages, seed=1)
    >>> torch.equal(params[1]["weight"], materialize([None, stages[1]], seed=1)[1]["weight"])
    True
    """
    modules = [stages.model] * len(stages.stages) if isinstance(stages, Split) else list(stages)
    owned = _stages_of_rank(len(modules), schedule, mesh, pipe)
    if isinstance(stages, Split):
        tied, names = stages.tied, names or (lambda stage, name: name)
    first = {(s, n): places[0] for places in (tied or {}).values() for s, n in places}
    named = names or (lambda stage, name: f"{stage}.{name}")
    maker = _ParameterMaker(modules, seed, named, init)
    where = device if device is not None else mesh.device_type if mesh is not None else "cpu"
    params: dict[int, dict[str, Tensor]] = {}
    for stage in owned:
        module = modules[stage]
        if module is None:
            continue
        require_type(
            f"stages[{stage}]", module, nn.Module, "a torch.nn.Module, or None for a stage of another process"
        )
        leaves = stages.params[stage] if isinstance(stages, Split) else dict(module.named_parameters())
        if not isinstance(stages, Split):
            for name, buffer in module.named_buffers():
                if buffer.is_meta:
                    raise ValueError(
                        f"stages[{stage}]: its buffer {name} is on meta, and buffers are not drawn; fill it"
                        " before"
                    )
        params[stage] = {}
        for name, parameter in leaves.items():
            whole = (
                maker.whole(*first.get((stage, name), (stage, name))).to(where)
                if parameter.is_meta
                else parameter.detach()
            )
            params[stage][name] = _laid(whole, parameter if like is None else like[stage][name], name)
    return params


def _stages_of_rank(
    stages: int, schedule: Schedule | None, mesh: DeviceMesh | None, pipe: str
) -> Sequence[int]:
    """List the stages of the model that this rank runs."""
    if schedule is None:
        if mesh is not None:
            raise ValueError("mesh needs a schedule, which says which stages each rank has; give schedule=")
        return range(stages)
    if max(schedule.model_stages) + 1 != stages:
        raise ValueError(
            f"stages: got {stages}, expected {max(schedule.model_stages) + 1}, those of the schedule"
            f" {schedule.name!r}"
        )
    if mesh is None:
        return range(stages)
    if pipe not in (mesh.mesh_dim_names or ()):
        raise ValueError(
            f"the mesh has no axis {pipe!r}: its axes are"
            f" {', '.join(mesh.mesh_dim_names or ()) or 'without names'}"
        )
    if mesh[pipe].size() != schedule.ranks:
        raise ValueError(
            f"the axis {pipe!r} has {mesh[pipe].size()} ranks, expected {schedule.ranks}, those of the"
            f" schedule {schedule.name!r}"
        )
    place = mesh.get_coordinate()  # in the order of the mesh, as ranks of a pipeline are counted
    if place is None:
        raise ValueError("mesh: got a mesh without this rank; call materialize on the ranks of the mesh only")
    return schedule.model_stages_of(place[(mesh.mesh_dim_names or ()).index(pipe)])


class _ParameterMaker:
    """Makes the parameters of modules on request, and keeps those of one module at a time."""

    def __init__(
        self,
        modules: Sequence[nn.Module | None],
        seed: int,
        names: Callable[[int, str], str],
        init: Init | None,
    ) -> None:
        self._modules, self._seed, self._names, self._init = modules, seed, names, init
        self._last: tuple[tuple[int, str], dict[str, Tensor]] | None = None

    def whole(self, stage: int, name: str) -> Tensor:
        """Make the parameter of this name on the CPU, in memory of its own."""
        root = self._modules[stage]
        if root is None:
            raise ValueError(
                f"{name} of stage {stage} is tied to a place on this rank, which is made as that is: give the"
                f" module of stage {stage}"
            )
        path, _, key = name.rpartition(".")
        if self._last is None or self._last[0] != (stage, path):
            self._last = (stage, path), self._values(stage, root, path)
        leaf = self._last[1].pop(key, None)
        # Asked for again, it is at another place that is tied to it.
        return self._values(stage, root, path)[key] if leaf is None else leaf

    def _values(self, stage: int, root: nn.Module, path: str) -> dict[str, Tensor]:
        """Make the whole parameters that a module has itself."""
        module = root.get_submodule(path)
        twin = copy(module)
        twin._parameters = {
            k: None
            if p is None
            else nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="cpu"), p.requires_grad)
            for k, p in module._parameters.items()
        }
        twin._buffers = {
            k: None if b is None else torch.empty_like(b, device="cpu") for k, b in module._buffers.items()
        }
        named = {
            k: self._names(stage, f"{path}.{k}".lstrip("."))
            for k, p in twin._parameters.items()
            if p is not None
        }
        whole = min(named.values()).rpartition(".")[0]
        with process_lock, torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(_hash(self._seed, whole))
            for initialise in _initialisers(root, twin):
                initialise()
        values = {k: p for k in named if (p := twin._parameters[k]) is not None}
        for k, p in values.items():
            before = version(p)
            if self._init is not None:
                with torch.no_grad():
                    self._init(named[k], p, torch.Generator().manual_seed(_hash(self._seed, named[k])))
            if not before and not version(p) and p.numel():
                raise ValueError(
                    f"nothing gives {named[k]} its values: {type(module).__name__} has no reset_parameters()"
                    " that writes it; give init=, a function of name, tensor and generator that does"
                )
        return {k: p.detach() for k, p in values.items()}


def _laid(leaf: Tensor, like: Tensor, name: str) -> Tensor:
    """Lay a whole leaf out as ``like`` is: of a DTensor, as this rank's part."""
    if like.shape != leaf.shape:
        raise ValueError(f"like: {name} has the shape {list(like.shape)}, the module has {list(leaf.shape)}")
    if not isinstance(like, DTensor) or isinstance(leaf, DTensor):
        return leaf
    # Without a source every rank cuts its own copy: nothing is sent.
    return distribute_tensor(leaf, like.device_mesh, like.placements, src_data_rank=None)


def _initialisers(root: nn.Module, twin: nn.Module) -> list[Callable[[], Any]]:
    """List the functions that initialise the parameters of a module: its constructor's, then the model's."""
    resets = (getattr(twin, name, None) for name in ("reset_parameters", "_reset_parameters"))
    functions: list[Callable[[], Any]] = [*filter(callable, resets)][:1]
    initialise = getattr(root, "_init_weights", None)
    if callable(initialise) and len(inspect.signature(initialise).parameters) == 1:
        functions.append(lambda: initialise(twin))
    return functions


def _hash(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big", signed=True)
