"""Cut layers into stages so that the bound of the schedule is low."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ppfunc.parallel.balance import partition_balanced
from ppfunc.parallel.partition import Partition

from ..costs import SENT, Costs, Number
from .bounds import bound_of
from .problem import Cap, Objective, problem_of

_SWEEPS = 8


def cut_layers(
    costs: Costs, layers: int, place: Sequence[int], microbatches: int, cap: Cap, objective: Objective
) -> tuple[Costs, Partition]:
    """Choose the layers of every stage, and return the costs of the stages and the cut.

    From the cut with the least load of the heaviest stage, boundaries move by one layer as long as that
    lowers the bound of the schedule. A cut that does not fit in the cap counts as worse than one that does.

    Args:
        costs: per layer.
        layers: number of layers.
        place: rank of every stage.
        microbatches: number of microbatches.
        cap: memory of a rank.
        objective: ``"makespan"`` or ``"span"``.

    Raises:
        ValueError: fewer layers than stages, or no cut that was tried fits in the cap.
    """
    costs = costs.fitting(layers)
    if len(place) > layers:
        raise ValueError(f"{layers} layers cannot be cut into {len(place)} stages: use fewer ranks or chunks")
    loads = [
        costs.of("forward", n) + costs.of("backward_input", n) + costs.of("backward_weight", n)
        for n in range(layers)
    ]

    def value(boundaries: Sequence[int]) -> tuple[Number, Number]:
        stages = costs_of_stages(costs, boundaries)
        try:
            bound = bound_of(problem_of(stages, place, microbatches, cap, objective)).value
        except ValueError:
            memory = [0] * (max(place) + 1)
            for s, rank in enumerate(place):
                memory[rank] += stages.of("activation", s) + stages.of("parameters", s)
            return max(memory), 0
        return 0, bound

    best = list(partition_balanced(loads, len(place)).boundaries)
    least = value(best)
    for _ in range(_SWEEPS):
        before = least
        for at in range(1, len(best) - 1):
            for step in (-1, 1):
                moved = [*best[:at], best[at] + step, *best[at + 1 :]]
                if moved[at - 1] < moved[at] < moved[at + 1] and (load := value(moved)) < least:
                    best, least = moved, load
        if not least < before:
            break
    return costs_of_stages(costs, best), Partition(tuple(best))


def costs_of_stages(costs: Costs, boundaries: Sequence[int]) -> Costs:
    """Add up costs per layer to costs per stage; a message is that of the last layer of a stage, a checkpoint
    that of the first."""
    layers, stages = range(boundaries[-1]), list(pairwise(boundaries))
    joined = {}
    for name in (name for name, value in vars(costs).items() if value is not None):
        values = [costs.of(name, layer) for layer in layers]
        place = {"checkpoint": 0}.get(name, -1 if name in SENT else None)
        rows = (values[begin:end] for begin, end in stages)
        parts = [row if place is None else [row[place]] for row in rows]
        joined[name] = [None if None in part else sum(part) for part in parts]
    shares = [costs.of("weight_share", layer) for layer in layers]
    if len(set(shares)) > 1:
        kept = [costs.of("activation", layer) * share for layer, share in enumerate(shares)]
        sums = zip(stages, joined["activation"], strict=True)
        shares = [min(1, sum(kept[begin:end]) / size) if size else 0 for (begin, end), size in sums]
    return replace(costs, **joined | {"weight_share": shares[: len(stages)]})
