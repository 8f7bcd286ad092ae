"""Measure stages: the seconds and bytes of their programs, as costs of schedules."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from ppfunc.runtime.lowering.ties import TiedPlaces
from ppfunc.runtime.paper.analysis import completed
from ppfunc.runtime.values.arguments import Microbatches
from ppfunc.schedule import Costs, looped_bfs, seq1f1b, split_backward, spread
from ppfunc.schedule.proof.timeline import timeline_of
from ppfunc.splitter import Split
from ppfunc.stage import Engine, Loss, Stage, graph
from ppfunc.stage.tree import tree_leaves
from ppfunc.steps import value_and_grad

from ._checks import naming_arguments, require_counts, require_type


@naming_arguments
def measure(
    stages: Sequence[Stage | None] | Split,
    params: Mapping[int, Any],
    example: Any,
    loss_fn: Loss | None = None,
    targets: Any = None,
    *,
    engine: Engine = graph,
    extras: Mapping[int, Any] | None = None,
    state: Mapping[int, Any] | None = None,
    tied: TiedPlaces = None,
    repeats: int = 9,
    memory: bool = True,
) -> Costs:
    """Run every stage on one microbatch in this process, alone, and take the median of several times.

    ``simulate(schedule, costs)`` is then in seconds, its memory in bytes; so are ``plan`` and its cap.

    Args:
        stages: functions, one per stage of the model, or a split model.
        params: ``{stage: tree}``, those of all stages.
        example: the inputs of one microbatch; of stages that take a carry, the slices of one sequence,
            ``ppfunc.microbatch(inputs, 1, slices=k)``, which are measured each.
        loss_fn: ``loss(y, target) -> scalar``, measured with the last stage; by default the sum of its
            output.
        targets: targets of one microbatch, or of the slices.
        engine: makes the programs that are measured.
        extras, state: ``{stage: tree}``, of one microbatch, for stages that take some.
        tied: see :func:`ppfunc.value_and_grad`.
        repeats: runs of each program.
        memory: count the bytes that forwards keep; if False, the costs have the default numbers for them.

    Returns:
        By stage of the model: seconds of F, I and W (B is I and W together); bytes of the message to the next
        stage, of the residuals of a forward and of the parameters with their gradients; the share of the
        residuals that is held until W. Messages take no time in these costs: it depends on where ranks are
        (``step.record`` measures it).

    Raises:
        ValueError: no stages, or targets without a loss function.
        StageError: what a stage keeps depends on values; ``memory=False`` does not ask.

    >>> params = {0: torch.tensor(2.0), 1: torch.tensor(3.0)}
    >>> costs = measure([torch.mul] * 2, params, torch.ones(100), repeats=1)
    >>> costs.bytes
    (400, 0)
    """
    require_type("stages", stages, Sequence | Split, "one function per stage of the model, or a split model")
    count = len(stages.stages if isinstance(stages, Split) else stages)
    require_counts(repeats=repeats)
    if count < 1:
        raise ValueError("stages: got none, expected one function per stage of the model")
    sliced = isinstance(example, Microbatches) and (len(example) > 1 or example._cut is not None)
    if loss_fn is None:
        if targets is not None:
            raise ValueError(
                "targets needs a loss function, which reads them; give loss_fn, or leave them out"
            )
        loss_fn, targets = _total, Microbatches([()] * len(example)) if sliced else ()
    arguments: dict[str, Any] = {"seed": (0, 0), "extras": extras, "state": state}
    encodes = isinstance(stages, Split) and bool(stages.encoder)
    alone = seq1f1b(1, 1, len(example), count) if sliced else looped_bfs(1, 1, count - encodes)
    if sliced:  # equal, whatever their lengths: times and bytes do not depend on them
        arguments["loss_weights"] = [1 / len(example)] * len(example)
    schedule = split_backward(spread(alone) if encodes else alone)
    step = value_and_grad(stages, loss_fn, schedule, engine=engine, has_aux=True, tied=tied)
    step(params, example, targets, **arguments)
    # The median time of every instruction of one rank with one microbatch, or with each slice of a sequence.
    timelines = [step.record(params, example, targets, **arguments)[1] for _ in range(repeats)]
    times = [[end - start for _, start, end in next(timeline.rows())] for timeline in timelines]
    ends = [median(row) for row in zip(*times, strict=True)]
    timeline = timeline_of(timelines[0].schedule, [[0] * len(ends)], [ends], Costs(seconds=True))
    compiled = step.lower(params, example, targets, **arguments).compile().step
    return _of_all_stages(completed(timeline.costs(), compiled.lowered, compiled.programs if memory else {}))


def _of_all_stages(costs: Costs) -> Costs:
    """Write mappings by stage as tuples, and messages that take no time as the default."""
    rows: dict[str, Any] = {
        name: (*row.values(),) for name, row in costs.numbers.items() if isinstance(row, Mapping)
    }
    return replace(costs, communication=0, slices=tuple(map(_of_all_stages, costs.slices)), **rows)


def _total(y: Any, target: Any) -> torch.Tensor:
    """Add up all floating leaves."""
    sums = [leaf.sum() for leaf in tree_leaves(y) if leaf.is_floating_point()]
    if not sums:
        raise TypeError("the last stage returns nothing to sum; give measure a loss function")
    return torch.stack(sums).sum()
