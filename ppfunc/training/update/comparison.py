"""Compare the states of ranks that train together, unless they are known to be equal."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import combinations
from typing import Any
from weakref import ref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ppfunc._checks import require_counts
from ppfunc.runtime.lowering.comparison import checksum
from ppfunc.runtime.lowering.ties import OTHER_VALUES
from ppfunc.stage import Signature
from ppfunc.stage._torch import transforming, versions
from ppfunc.stage.device import preserve_rng
from ppfunc.stage.layout import local
from ppfunc.stage.tree import tree_flatten, tree_leaves

from ..optim.protocols import Tree
from .ranks import TrainingRanks
from .stage_trees import StageLeaves, read
from .train_state import TrainState
from .update_rule import UpdateRule, updated_ones

ByAxes = dict[tuple[str, ...], list[str]]
"""Terms that the ranks along some data axes share, by these axes."""

_CUT_FROM: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by the step of a state: terms on whole parameters


def note_whole(ranks: TrainingRanks, step: torch.Tensor, params: Mapping[int, object]) -> None:
    """Note checksums of the parameters that a state of this ``step`` is cut from, for its first step."""
    if step.is_meta:  # of a state that no step begins from
        return
    _CUT_FROM[step] = _checksums(ranks, ((f"parameters of stage {s}", t) for s, t in sorted(params.items())))


def start_facts(
    rule: UpdateRule, ranks: TrainingRanks, state: TrainState
) -> tuple[str, dict[tuple[str, ...], str]]:
    """Write the terms that must be equal: on all ranks, and, by data axes, on the ranks along these that hold
    the same stages.

    A user's own optimizer is known only by name, so that ranks also compare how it updates ones. Reads
    numbers of the device. A state without values, of a step that is lowered, has none to compare.
    """
    if ranks.world.size == 1 or state.step.is_meta:
        return "", {}
    scale = ", ".join(f"{name} {value.item():g}" for name, value in sorted(state.scale.items()))
    common = f"state of step {int(state.step)}{f' with the scale {scale}' if scale else ''}"
    if ranks.data.size == 1:
        return common, {}
    facts = _checksums(
        ranks, ((f"{name} of stage {s}", tree) for s in ranks.stages for name, tree in _trees(rule, state, s))
    )
    for axes, terms in _CUT_FROM.get(state.step, {}).items():
        facts[axes] += terms
    for s in ranks.stages:
        names = rule.frozen.names(s, Signature.of(state.params[s]))
        facts[ranks.axes.data_axes].append(f"{', '.join(names) or 'nothing'} of stage {s} frozen")
    return common, {axes: "; ".join(terms) for axes, terms in facts.items()}


def alike_in_places(
    rule: UpdateRule, ranks: TrainingRanks, params: Mapping[int, Tree]
) -> Iterator[tuple[str, dict[int, list[torch.Tensor | None]]]]:
    """Yield the parameters of every stage, then updates of ones by the optimizer, each with words.

    The updates find an optimizer that treats places of one parameter differently: its groups and masks go
    by names, which differ.
    """
    trees = {s: tree_flatten(tree) for s, tree in params.items()}
    yield OTHER_VALUES, {s: leaves for s, (leaves, _) in trees.items()}
    changed: dict[int, Any] = {}
    for s, (_, treedef) in trees.items():
        trained = rule.frozen.trained(s, params[s])
        devices = {local(leaf).device for leaf in tree_leaves(trained)}
        with preserve_rng(devices):
            for device in devices:  # an optimizer that draws gives each place other numbers
                torch.rand(1 + s + ranks.schedule.stages * ranks.ranks[0], device=device)
            changed[s] = treedef.flatten_up_to(updated_ones(rule.optimizer, trained))
    yield "is updated by the optimizer in another way", changed


def _trees(rule: UpdateRule, state: TrainState, stage: int) -> list[tuple[str, object]]:
    params = state.params[stage]
    return [
        ("parameters", params),
        ("optimizer state", state.optimizer[stage]),
        ("state", state.stage_state.get(stage, {})),
        (
            "ones updated by the optimizer",
            updated_ones(rule.optimizer, rule.frozen.trained(stage, params)),
        ),
    ]


def _checksums(ranks: TrainingRanks, trees: Iterable[tuple[str, object]]) -> ByAxes:
    """Write checksums of named trees, by the data axes along which ranks keep the same leaves.

    All ranks get the same axes, every combination of data axes, so that they compare one after the other.
    """
    every = ranks.axes.data_axes
    facts: ByAxes = {axes: [] for n in range(len(every), 0, -1) for axes in combinations(every, n)}
    for name, tree in trees:
        sums: dict[tuple[str, ...], list[torch.Tensor]] = {every: []}
        for leaf in tree_leaves(tree):
            sums.setdefault(ranks.copied_over(leaf), []).append(checksum(local(leaf)))
        for axes in facts.keys() & sums.keys():  # nobody has a copy of what is cut over all of them
            facts[axes].append(f"the {name} with the checksum {_digest(sums[axes])}")
    return facts


def _digest(sums: Sequence[torch.Tensor]) -> str:
    if not sums:
        return "none"
    numbers = torch.stack([s.to(sums[0].device) for s in sums]).tolist()
    return sha256(repr(numbers).encode()).hexdigest()[:16]


class KnownState:
    """Recognises the state that the last step returned, unless something has written into it.

    Every data rank keeps the same count, since a step ends on all ranks or on none.

    Args:
        every: after how many steps ranks compare the state all the same; None for never.

    Attributes:
        due: the next step is to be compared for that reason.
    """

    def __init__(self, every: int | None) -> None:
        if every is not None:
            require_counts(checksum_every=every)
        self.every, self.due = every, False
        self._steps = 0  # of all calls that have ended well
        self._generation: int | None = None  # the failures before; None where no state is known
        self._step: Callable[[], torch.Tensor | None] = lambda: None
        self._versions: list[int | None] = []  # how often each leaf was written into, and where it is

    def goes_on(self, state: TrainState, stages: Mapping[int, StageLeaves], generation: int) -> bool:
        """Tell whether this is the known state, unwritten, and ``generation`` counts no new failure.

        Args:
            stages: its leaves, which a step has made.
        """
        return (
            self._generation == generation
            and self._step() is state.step
            and self._versions == _versions(state, stages)
        )

    def note(self, state: TrainState, stages: Mapping[int, StageLeaves], generation: int, steps: int) -> None:
        """Note the state after so many more steps."""
        before, self._steps = self._steps, self._steps + steps
        self.due = self.every is not None and before // self.every != self._steps // self.every
        self._generation = None if self.due else generation
        self._step, self._versions = ref(state.step), _versions(state, stages)


def _versions(state: TrainState, stages: Mapping[int, StageLeaves]) -> list[int | None]:
    leaves = [state.step, *state.scale.values()]
    for trees, params, optimizer, _ in stages.values():
        leaves += [*read(params, trees.params), *read(optimizer, trees.optimizer)]
    addresses = [] if transforming() else map(torch.Tensor.data_ptr, leaves)  # `.data = other` is no write
    return [*versions(leaves), *addresses]
