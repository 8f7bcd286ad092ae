"""Cut a model into stages, whole or over tensor ranks, and find their seconds and bytes.

They are measured in this process, or counted over given speeds.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from math import inf
from operator import add
from typing import Any, NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import Module

from ppfunc._checks import shown
from ppfunc.runtime import microbatch
from ppfunc.runtime.lowering.stage_programs import StageCall
from ppfunc.schedule import (
    Costs,
    Flow,
    Op,
    Schedule,
    Timeline,
    arrange,
    place_communication,
    seq1f1b,
    simulate,
    split_backward,
)
from ppfunc.schedule.instruction import COMPUTE, SENDS, TAIL
from ppfunc.splitter import Split, split
from ppfunc.stage import Engine, Loss, StageError, StageProgram
from ppfunc.stage._torch import TorchDispatchMode
from ppfunc.stage.device import accelerates
from ppfunc.stage.layout import layout_of, local
from ppfunc.stage.operators import flops_of
from ppfunc.stage.tree import tree_leaves, tree_map
from ppfunc.training import Trainer
from ppfunc.vocabulary import VocabularyLoss, VocabularyParallel, vocabulary_parallel

Lay = Callable[[DeviceMesh], Module]
"""``(mesh) -> module``: a copy of the model, laid over one axis of a mesh."""


class ModelCut(NamedTuple):
    """Name a way to cut a model into stages.

    Args:
        stages: number of stages beside the encoder and the parts of the output layer.
        slices: number of slices of a sequence, 0 for no carry.
        output, encoder: names of the modules that are stages of their own; None without.
        parts: number of parts of the output layer.
    """

    stages: int
    slices: int = 0
    output: str | None = None
    encoder: str | None = None
    parts: int = 0


class Pieces(NamedTuple):
    """Hold a model in stages: as it was split, and with its output layer in parts, if it has some."""

    split: Split
    whole: VocabularyParallel | None = None

    @property
    def at(self) -> tuple[str, ...]:
        return self.split.at[: -1 if self.whole else None]

    def of_step(self, trees: dict[int, Any]) -> dict[int, Any]:
        """Return parameters or states of the split as a step takes them."""
        return self.whole.cut(trees) if self.whole else trees

    def schedule(self, ranks: int) -> Schedule:
        """Return a schedule in which all stages have one rank, or each its own."""
        count = len((self.whole or self.split).stages)
        chain = tuple(range(count - bool(self.split.encoder)))
        encoder = range(chain[-1] + 1, count)
        alone = tuple(pairwise(chain)) if encoder else None
        flow = Flow((*encoder, *chain), range(MICROBATCHES), self.whole.edges if self.whole else alone)
        skips = [(stage, 0) for stage in encoder]
        return arrange([stage % ranks for stage in range(count)], [flow], skips=skips)


class Cuts:
    """Holds a model in stages, which all candidates share.

    Args:
        model: model, or a split of it, whose cuts stay.
        args: inputs of the model, of some rows.
        sizes: rows of the calls that cut the model, of which the largest number that runs counts.
        lay: function that lays the model over tensor ranks, if there are any.
        loss: loss function, which an output layer in parts computes.
    """

    def __init__(
        self, model: Module | Split, args: Any, sizes: Iterable[int], lay: Lay | None, loss: Loss
    ) -> None:
        self._given, self._args, self._lay, self._loss = model, args, lay, loss
        self._sizes = sorted(sizes, reverse=True)
        self._on_paper = cache(self._lay_on_paper)
        devices = (leaf.device.type for leaf in parameters_of(model) if not leaf.is_meta)
        self.device = next(devices, "cpu")  # of a mesh
        # Torch caches what DTensors do by the names of axes, also over groups that are gone.
        self.axis = f"tensor ranks of search {uuid4()}"

    def split(self, cut: ModelCut, tensor: int) -> Pieces:
        """Split the model, whole or over tensor ranks on paper."""
        given = self._given
        pieces = Pieces(given) if isinstance(given, Split) else self._cut(given, cut.stages, cut)
        if isinstance(given, Split) and cut.stages != len(given.stages):
            raise ValueError(f"{cut.stages} stages, and the model was split into {len(given.stages)}")
        return pieces if tensor == 1 else self._cut(self._on_paper(tensor), pieces.at, cut)

    def laid_over(self, axis: DeviceMesh, at: tuple[str, ...], cut: ModelCut) -> Pieces:
        """Split the model over an axis of a mesh, all ranks of which call this."""
        return self._cut(self._laid(axis), at, cut)

    def _cut(self, model: Module, at: int | tuple[str, ...], cut: ModelCut) -> Pieces:
        failed: list[Exception] = []
        for rows in self._sizes:
            try:
                args, slices = rows_of(self._args, rows), cut.slices or None
                parts = split(model, args, at=at, slices=slices, output=cut.output, encoder=cut.encoder)
                loss = self._loss if isinstance(self._loss, VocabularyLoss) else None
                return Pieces(parts, vocabulary_parallel(parts, cut.parts, loss) if cut.parts else None)
            except (ValueError, StageError) as error:
                failed.append(error)
        raise failed[0]

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
    """Group the names of parameters: those of one parameter are tied."""
    names: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return set(map(tuple, names.values()))


def rows_of(tree: Any, rows: int) -> Any:
    """Repeat or cut a batch to ``rows`` rows, cyclically; leaves that are no tensors stay."""

    def taken(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf[torch.arange(rows, device=leaf.device) % len(leaf)]

    return tree_map(taken, tree)


def batch_of(tree: Any, rows: int, sequences: int, slices: int) -> Any:
    """Make a batch of ``rows`` rows, cut into the slices of the sequences unless ``slices`` is 0."""
    batch = rows_of(tree, rows)
    return microbatch(batch, sequences, slices=slices) if slices and tree_leaves(tree) else batch


MICROBATCHES = 3  # of a step that is timed: most of them add to sums of gradients, as in a step of many
_STEPS = 7  # that are measured
_TIMED = ("forward", "backward_input", "backward_weight", "step")
_PROGRAMS = ("forward", "backward", "backward_input", "backward_weight")
_BUSY = COMPUTE | SENDS | {Op.UNSHARD, *TAIL}

Speeds = tuple[float, float] | None
Ring = tuple[int, float, float]
"""Tensor ranks, seconds of a hop from one to the next, and bytes per second."""


def _timed(step: Callable[[], Any]) -> Costs:
    """Return the least seconds of several steps by kind and stage: other processes only add to them."""
    step()  # which compiles
    return _least(*(step()[1].costs() for _ in range(_STEPS)))


def _least(*runs: Costs) -> Costs:
    times = {
        kind: tuple(map(min, zip(*(vars(run)[kind] for run in runs), strict=True)))
        for kind in _TIMED
        if isinstance(vars(runs[0])[kind], tuple)  # an update belongs to no slice
    }
    return Costs(**times, seconds=True, slices=tuple(map(_least, *(run.slices for run in runs))))


def _both(whole: Costs, halves: Costs) -> Costs:
    """Combine times of steps with whole backwards and with I and W apart."""
    return replace(
        whole,
        backward_input=halves.backward_input,
        backward_weight=halves.backward_weight,
        backward=tuple(2 * seconds for seconds in _tuple(whole.backward_input)),
        slices=tuple(map(_both, whole.slices, halves.slices)),
    )


def _tuple(value: Any) -> tuple[float, ...]:
    assert isinstance(value, tuple)
    return value


def _sum(times: Costs, sent: Costs) -> Costs:
    """Add the seconds of collectives to the times of programs."""
    sums: dict[str, Any] = {k: tuple(map(add, vars(times)[k], vars(sent)[k])) for k in _PROGRAMS}
    return replace(times, slices=tuple(map(_sum, times.slices, sent.slices)), **sums)


def times_of(
    make: Callable[[Pieces, Schedule], Trainer],
    pieces: Pieces,
    batch: Sequence[Any],
    speeds: Speeds,
    ring: Ring = (1, 0, inf),
    slices: int = 0,
) -> Costs:
    """Return the costs of every stage: of whole backwards, of I and W apart, of updates; bytes as lowered.

    Args:
        make: makes a trainer of the pieces and a schedule.
        pieces: the model in stages.
        batch: inputs and targets of ``MICROBATCHES`` microbatches.
        speeds: operations and bytes per second, over which those of every operator are counted; an update
            reads the gradients, and reads and writes parameters and optimizer. None to run every stage on one
            rank.
        ring: over which the collectives of stages are counted in either case.
        slices: number of slices of each microbatch, whose costs are returned; 0 for no carry.
    """
    count = len((pieces.whole or pieces.split).stages)
    ranks, chunks = (1, count) if speeds is None else (count, 1)
    schedule = seq1f1b(ranks, MICROBATCHES, slices, chunks) if slices else pieces.schedule(ranks)
    both = [make(pieces, each) for each in (schedule, split_backward(schedule))]
    trees = [pieces.of_step(trees) for trees in (pieces.split.params, pieces.split.state)]
    lowered, apart = (each.lower(trees[0], *batch, state=trees[1]) for each in both)
    if speeds is None:
        state = both[0].init(*(tree_map(torch.clone, each) for each in trees))
        whole, halves = (_timed(partial(t.record, state, *batch, seed=(0, 0))) for t in both)
        times = lowered.costs(_both(whole, halves))
        if ring[0] == 1:
            return times
        return _sum(times, times_of(make, pieces, batch, (inf, inf), ring, slices))
    counter = partial(_Roofline, *speeds, ring)
    counts = [list(zip(*each.cost_analysis(counter).values(), strict=True)) for each in (lowered, apart)]
    f, b, i, w = (tuple(x / schedule.microbatches for x in xs) for xs in (*counts[0][:2], *counts[1][2:]))
    state = lowered.state
    moved = (
        [p, p, p, state.optimizer[stage], state.optimizer[stage]] for stage, p in sorted(state.params.items())
    )
    step = tuple(sum(local(leaf).nbytes for leaf in tree_leaves(tree)) / speeds[1] for tree in moved)
    return lowered.costs(Costs(f, i, w, b, step=step, seconds=True))


def concurrency_of(model: torch.nn.Module | Split, cores: float | None, speeds: Speeds) -> float:
    """Return the number of ranks that can compute at one time; ``cores`` as in :func:`ppfunc.tune`."""
    if cores is None:
        here = speeds is None and not any(accelerates(leaf.device) for leaf in parameters_of(model))
        mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        cores = mine if here else inf
    return max(1, cores / torch.get_num_threads())


def parameters_of(model: torch.nn.Module | Split) -> list[Any]:
    """List the parameters of a model, or of its parts."""
    return tree_leaves(model.params if isinstance(model, Split) else list(model.parameters()))


def seconds_of(timeline: Timeline, costs: Costs, at_once: float) -> float:
    """Return the seconds of a step if ``at_once`` ranks compute at one time, and further ranks in turn.

    While more would be computed, sent, or added up at one time, all of it takes longer in proportion.
    """
    if at_once >= timeline.schedule.ranks:
        return timeline.makespan
    placed = simulate(place_communication(timeline.schedule), costs)
    spans = [(a, b) for row in placed.rows() for i, a, b in row if i.op in _BUSY]
    changes = sorted(change for a, b in spans for change in ((a, 1), (b, -1)))
    busy, now, seconds = 0, 0.0, timeline.makespan
    for at, change in changes:
        seconds += (at - now) * (max(1, busy / at_once) - 1)
        busy, now = busy + change, at
    return seconds


class _Roofline(TorchDispatchMode):
    """Adds up the seconds of operators: operations or bytes, what takes longer. Views take no time.

    Collectives pass parts around a ring of ranks, of which sums take two rounds.
    """

    def __init__(self, flops: float, bytes: float, ring: Ring) -> None:
        super().__init__()
        self._flops, self._bytes, self._ring, self._seconds = flops, bytes, ring, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional":
            ranks, latency, bandwidth = self._ring
            size = max(map(_bytes_of, ((args, kwargs), result)))
            rounds = 0 if "wait" in str(func) else 2 if "all_reduce" in str(func) else 1
            self._seconds += rounds * (ranks - 1) * (latency + size / ranks / bandwidth)
        elif not func.is_view:
            operations = flops_of(func._overloadpacket, args, kwargs or {}, result)
            moved = _bytes_of([args, kwargs, result])
            self._seconds += max(operations / self._flops, moved / self._bytes)
        return result

    def get_total_flops(self) -> float:
        """Return the seconds, where a counter of operations returns these."""
        return self._seconds


def _bytes_of(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def remembering(engine: Engine) -> Engine:
    """Return an engine that traces a stage once for all trainers."""
    programs: dict[Any, StageProgram] = {}

    def remembered(fn: Any, example: tuple[Any, ...], **request: Any) -> StageProgram:
        key = id(fn.fn), StageCall(fn, example, request["name"], request["device"]).key
        return programs.get(key) or programs.setdefault(key, engine(fn, example, **request))

    return remembered
