"""Find the seconds and bytes of stages: measured in this process, or counted over given speeds."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ppfunc.schedule import Costs, Schedule, gpipe, looped_bfs, split_backward
from ppfunc.splitter import Split
from ppfunc.stage._torch import TorchDispatchMode
from ppfunc.stage.tree import tree_leaves, tree_map
from ppfunc.training import Trainer
from ppfunc.training.lowered import on_meta

MICROBATCHES = 3  # of a step that is timed: most of them add to sums of gradients, as in a step of many
_STEPS = 6  # that are measured, the first of which is not counted

Speeds = tuple[float, float] | None


def times_of(
    make: Callable[[Split, Schedule], Trainer], parts: Split, batch: tuple[Any, Any], speeds: Speeds
) -> Costs:
    """Return the costs of every stage: of whole backwards, of I and W apart, of updates; bytes as lowered.

    Args:
        make: makes a trainer of parts and a schedule.
        batch: inputs and targets of ``MICROBATCHES`` microbatches.
        speeds: operations and bytes per second, over which those of every operator are counted; an update
            reads the gradients, and reads and writes parameters and optimizer. None to run every stage on one
            rank: each has the least over some steps of the median of its microbatches, since what other
            processes take of this machine only adds.
    """
    count = len(parts.stages)
    schedule = looped_bfs(1, MICROBATCHES, count) if speeds is None else gpipe(count, MICROBATCHES)
    both = [make(parts, each) for each in (schedule, split_backward(schedule))]
    lowered, apart = (each.lower(parts.params, *batch, state=parts.state) for each in both)
    if speeds is None:
        state = both[0].init(tree_map(torch.clone, parts.params), tree_map(torch.clone, parts.state))
        whole, halves = (
            [each.record(state, *batch, seed=(0, 0))[1].costs() for _ in range(_STEPS)][1:] for each in both
        )
        f, b, step = (_least(vars(c)[k] for c in whole) for k in ("forward", "backward_input", "step"))
        i, w = (_least(vars(c)[k] for c in halves) for k in ("backward_input", "backward_weight"))
        return lowered.costs(Costs(f, i, w, tuple(2 * seconds for seconds in b), step=step))
    counter, meta = partial(_Roofline, *speeds), both[0].init(on_meta(parts.params), on_meta(parts.state))
    counts = [list(zip(*each.cost_analysis(counter).values(), strict=True)) for each in (lowered, apart)]
    f, b, i, w = (tuple(x / MICROBATCHES for x in xs) for xs in (*counts[0][:2], *counts[1][2:]))
    moved = ([p, p, p, meta.optimizer[stage], meta.optimizer[stage]] for stage, p in meta.params.items())
    step = tuple(sum(leaf.nbytes for leaf in tree_leaves(tree)) / speeds[1] for tree in moved)
    return lowered.costs(Costs(f, i, w, b, step=step))


def _least(rows: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(map(min, zip(*rows, strict=True)))


class _Roofline(TorchDispatchMode):
    """Adds up the seconds of operators: operations or bytes, what takes longer. Views take no time."""

    def __init__(self, flops: float, bytes: float) -> None:
        super().__init__()
        self._flops, self._bytes, self._seconds = flops, bytes, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            counted = flop_registry.get(func._overloadpacket, lambda *args, **kwargs: 0)
            operations = counted(*args, **(kwargs or {}), out_val=result)
            leaves = tree_leaves([args, kwargs, result])
            moved = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
            self._seconds += max(operations / self._flops, moved / self._bytes)
        return result

    def get_total_flops(self) -> float:
        """Return the seconds, where a counter of operations returns these."""
        return self._seconds
