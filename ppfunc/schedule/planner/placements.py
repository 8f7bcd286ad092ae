"""Choose where stages are, and which layers they have: placements with the costs of their stages."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal, NamedTuple

from ppfunc._checks import require_counts
from ppfunc.parallel import Partition, Placement, explicit, loop, partition_balanced

from ..costs import OF_THE_MODEL, SENT, Costs, Number, exact_portion
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


Style = Literal["loop", "v", "wave", "any"]


class Candidate(NamedTuple):
    """A placement, the costs of its stages, and the layers of each stage where layers were given."""

    name: str
    placement: Placement
    costs: Costs
    partition: Partition | None = None


def wave(ranks: int, chunks: int) -> Placement:
    """Let stages go up the ranks, down, up again, ``chunks`` times: the stages at a turn share a rank.

    >>> wave(3, 3)
    (0, 1, 2, 2, 1, 0, 0, 1, 2)
    """
    require_counts(ranks=ranks, chunks=chunks)
    up = tuple(range(ranks))
    return tuple(rank for k in range(chunks) for rank in (up[::-1] if k % 2 else up))


def candidates(
    ranks: int,
    microbatches: int,
    costs: Costs,
    placement: Style | Sequence[int],
    chunks: int | Sequence[int] | None,
    layers: int | None,
    cap: Cap,
    objective: Objective,
) -> list[Candidate]:
    """Return the placements asked for; arguments as of :func:`ppfunc.schedule.planner.plan.plan`."""
    require_counts(ranks=ranks)
    shapes = _shapes(ranks, costs, placement, chunks, layers)
    least = min(len(place) for place in shapes.values())
    listed = []
    for name, place in shapes.items():
        if layers is None:
            listed.append(Candidate(name, place, shared_costs(costs, least, len(place)).fitting(len(place))))
        else:
            listed.append(
                Candidate(name, place, *cut_layers(costs, layers, place, microbatches, cap, objective))
            )
    return listed


def _shapes(
    ranks: int,
    costs: Costs,
    placement: Style | Sequence[int],
    chunks: int | Sequence[int] | None,
    layers: int | None,
) -> dict[str, Placement]:
    """Return the placements by name."""
    if isinstance(placement, Sequence) and not isinstance(placement, str):
        place = explicit(placement)
        if max(place) + 1 != ranks:
            raise ValueError(f"placement has {max(place) + 1} ranks, expected {ranks}")
        if chunks is not None:
            raise ValueError(
                f"chunks is {chunks!r}, but the placement is given rank by rank: leave chunks out"
            )
        return {"explicit": place}
    if not isinstance(placement, str) or placement not in ("loop", "v", "wave", "any"):
        raise ValueError(
            f"placement is {placement!r}, expected 'loop', 'v', 'wave', 'any' or the rank of every stage"
        )
    counts = chunk_counts(ranks, costs, placement, chunks, layers)
    shapes: dict[str, Placement] = {}
    for v in counts:
        if v == 1 or placement in ("loop", "any"):
            shapes[f"loop of {v}"] = loop(ranks, v)
        if v > 1 and placement != "loop":
            shapes["V" if v == 2 else f"wave of {v}"] = wave(ranks, v)
    return shapes


def chunk_counts(
    ranks: int, costs: Costs, placement: str, chunks: int | Sequence[int] | None, layers: int | None
) -> Sequence[int]:
    """List the numbers of stages per rank to try."""
    sizes = {len(value) for value in vars(costs).values() if isinstance(value, Sequence)}
    named = any(isinstance(value, Mapping) for value in vars(costs).values())
    if placement == "v":
        if chunks not in (None, 2) and (not isinstance(chunks, Sequence) or list(chunks) != [2]):
            raise ValueError(
                f"chunks is {chunks!r}, but a V has 2: leave chunks out, or use placement='wave'"
            )
        return [2]
    if chunks is None and sizes and layers is None:
        stages = max(sizes)
        if not stages or stages % ranks:
            raise ValueError(
                f"costs are given for {stages} stages, expected a multiple of {ranks} ranks; or pass"
                f" layers={stages}"
            )
        return [stages // ranks]
    if chunks is None:
        counts = {"loop": [1], "wave": [2], "any": [1, 2, 3, 4]}[placement]
    else:
        counts = list(chunks) if isinstance(chunks, Sequence) and not isinstance(chunks, str) else [chunks]
    if not counts:
        raise ValueError("chunks names no number, expected one or several, such as range(1, 5)")
    for v in counts:
        require_counts(chunks=v)
    if layers is not None:
        require_counts(layers=layers)
        counts = [v for v in counts if v * ranks <= layers] or counts[:1]
    elif len(counts) > 1 and (sizes or named):
        raise ValueError(
            "costs are given per stage, but chunks allows several numbers of stages: give costs per layer,"
            " and layers="
        )
    return counts


def shared_costs(costs: Costs, stages: int, wanted: int) -> Costs:
    """Convert costs of one of ``stages`` stages, equal for all, to a model cut into ``wanted`` stages."""
    if stages == wanted:
        return costs
    return replace(
        costs,
        **{
            name: exact_portion(v, stages, wanted)
            for name in OF_THE_MODEL
            if (v := getattr(costs, name)) is not None
        },
    )
