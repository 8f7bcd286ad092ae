"""Choose the modules at which to cut a model: stages of equal cost, or a partition of its layers."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ppfunc.parallel.balance import partition_balanced
from ppfunc.parallel.partition import Partition
from ppfunc.stage.abstract.evaluation import without_values
from ppfunc.stage.layout import layout_of

from .call import CallForm
from .functional import fake_sources, replay
from .trace import PIPE_SPLIT, LeafForm, Trace, trace, undisturbed

_NEAR = 1.2  # a heaviest stage of so much more than the least is near enough, if cutting deeper is not needed


def choose(
    model: nn.Module,
    form: CallForm,
    tensors: Sequence[Tensor],
    device: torch.device,
    at: int | Partition | None,
) -> tuple[list[str], Trace]:
    """Choose the modules that begin the stages after the first.

    The layers of a model are the elements of its ``ModuleList`` and ``Sequential`` containers, those of the
    outermost ones first. Elements of inner containers are cut apart where the outer ones are too few, or too
    unequal; where there are no containers, any module is.

    Args:
        at: the number of stages, a partition of the layers, or None for the calls of ``pipe_split()``.

    Returns:
        The names, and the trace by which they were found.

    Raises:
        ValueError: there are not so many layers.
        TypeError: the model has no cuts of its own, and none are asked for.
    """
    if isinstance(at, int) and any(layout_of(p) is not None for p in model.parameters()):
        raise ValueError(
            f"at: got {at} stages of a model with DTensors; give the names of modules, or a Partition"
        )
    levels = _levels(model)
    traced = trace(model, form, [LeafForm(tuple(t.shape), t.dtype) for t in tensors], device, levels[-1])
    if at is None:
        if not (names := [name for name in traced.begun if name.startswith(PIPE_SPLIT)]):
            raise TypeError(
                "at: got none, expected names of modules, a number of stages, or a Partition; or a model that"
                " calls torch.distributed.pipelining.pipe_split()"
            )
        return names, traced
    called = [_in_order(names, traced.begun) for names in levels]
    if isinstance(at, Partition):
        return _of_partition(called, at), traced
    if isinstance(at, bool) or not isinstance(at, int) or at < 1:
        raise ValueError(f"at: got {at!r}, expected names of modules, a number of stages, or a Partition")
    return _balanced(called, traced.begun, _flops(traced, device), at), traced


def _levels(model: nn.Module) -> list[list[str]]:
    """List the names of modules by how many containers they are in; last, of all modules."""
    kinds = dict(model.named_modules())
    depths: dict[int, list[str]] = {}
    for name in filter(None, kinds):
        parents = [name[:i] for i, c in enumerate(name) if c == "."] + [""]
        inside = [p for p in parents if isinstance(kinds.get(p), nn.ModuleList | nn.Sequential)]
        if isinstance(kinds.get(name.rpartition(".")[0]), nn.ModuleList | nn.Sequential):
            depths.setdefault(len(inside), []).append(name)
    levels: list[list[str]] = []
    for depth in sorted(depths):
        levels.append([*(levels[-1] if levels else []), *depths[depth]])
    return [*levels, [name for name in kinds if name]]


def _in_order(names: Sequence[str], begun: Mapping[str, int]) -> list[str]:
    """Sort the modules that are called by their first calls; keep the first of those at the same operator."""
    first: dict[int, str] = {}
    for name in names:
        if name in begun:
            first.setdefault(begun[name], name)
    return [first[at] for at in sorted(first)]


def _of_partition(called: Sequence[Sequence[str]], partition: Partition) -> list[str]:
    for names in called:
        if len(names) == partition.layers:
            return [names[start] for start in partition.boundaries[1:-1]]
    counts = ", ".join(f"{len(names)} ({names[0]} to {names[-1]})" for names in called[:-1] if names)
    raise ValueError(
        f"at: got a partition of {partition.layers} layers; the model has"
        f" {counts or 'no ModuleList or Sequential of layers'}"
    )


def _balanced(
    called: Sequence[Sequence[str]], begun: Mapping[str, int], marks: Sequence[float], stages: int
) -> list[str]:
    """Balance the stages at the outermost level whose heaviest stage is near the least of all levels."""
    cuts = [[name for name in names if 0 < begun[name] < len(marks) - 1] for names in called]
    levels = [names for names in cuts[:-1] if len(names) >= stages - 1] or [
        names for names in cuts[-1:] if len(names) >= stages - 1
    ]
    choices: list[tuple[float, list[str]]] = []
    for names in levels:
        weights = [
            marks[b] - marks[a] for a, b in pairwise([0, *(begun[name] for name in names), len(marks) - 1])
        ]
        partition = partition_balanced(weights, stages)
        choices.append((max(partition.loads(weights)), [names[b - 1] for b in partition.boundaries[1:-1]]))
    if not choices:
        raise ValueError(
            f"at: got {stages} stages, the model calls {len(called[-1])} modules one after the other; take"
            " fewer stages"
        )
    least = min(heaviest for heaviest, _ in choices)
    return next(names for heaviest, names in choices if heaviest <= _NEAR * least)


def _flops(traced: Trace, device: torch.device) -> list[float]:
    """Count operations before each operator and after the last.

    An operation is a multiplication, an addition, or an element made.
    """
    marks, elements = [], 0
    with undisturbed(), without_values(), FlopCounterMode(display=False) as counter:
        sources = {
            node: t.detach() for node, t in fake_sources(traced, device).items()
        }  # the counter hooks onto histories of modules
        for node in replay(traced, sources):
            if node.op == "call_function":
                marks.append(counter.get_total_flops() + elements)
                elements += torch.Size(node.meta["value"].shape).numel() if "value" in node.meta else 0
        return [*marks, counter.get_total_flops() + elements]
