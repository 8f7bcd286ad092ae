"""Describe the facts that ranks that train together compare first: options, and values of states."""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import combinations

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ppfunc.runtime.agreement.checksums import checksum
from ppfunc.stage import Signature
from ppfunc.stage.layout import local
from ppfunc.stage.tree import tree_leaves

from .ranks import TrainingRanks
from .train_state import TrainState
from .update_rule import UpdateRule, updated_ones

ByAxes = dict[tuple[str, ...], list[str]]
"""Terms that the ranks along some data axes share, by these axes."""

_CUT_FROM: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by the step of a state: terms on whole parameters


def note_whole(ranks: TrainingRanks, step: Tensor, params: Mapping[int, object]) -> None:
    """Note checksums of the parameters that a state of this ``step`` is cut from, for its first step."""
    if step.is_meta:  # of a state that no step begins from
        return
    _CUT_FROM[step] = _checksums(ranks, ((f"parameters of stage {s}", t) for s, t in sorted(params.items())))


def start_facts(
    rule: UpdateRule, ranks: TrainingRanks, state: TrainState
) -> tuple[str, dict[tuple[str, ...], str]]:
    """Write the terms that all ranks have to share, and those that the ranks of a stage along data axes have
    to share, for any of these axes.

    A user's own optimizer is known only by name, so that ranks also compare how it updates ones. Reads
    numbers of the device; ranks compare them once. A state without values, of a step that is lowered, has
    none to compare.
    """
    if ranks.world.size == 1 or state.step.is_meta:
        return "", {}
    scale = ", ".join(f"{name} {value.item():g}" for name, value in sorted(state.scale.items()))
    common = [
        *rule.numbers_text,
        f"state of step {int(state.step)}{f' with the scale {scale}' if scale else ''}",
    ]
    if ranks.data.size == 1:
        return "; ".join(common), {}
    facts = _checksums(
        ranks, ((f"{name} of stage {s}", tree) for s in ranks.stages for name, tree in _trees(rule, state, s))
    )
    for axes, terms in _CUT_FROM.get(state.step, {}).items():
        facts[axes] += terms
    for s in ranks.stages:
        names = rule.frozen.names(s, Signature.of(state.params[s]))
        facts[ranks.axes.data_axes].append(f"{', '.join(names) or 'nothing'} of stage {s} frozen")
    return "; ".join(common), {axes: "; ".join(terms) for axes, terms in facts.items()}


def _trees(rule: UpdateRule, state: TrainState, stage: int) -> list[tuple[str, object]]:
    params = state.params[stage]
    return [
        ("parameters", params),
        ("optimizer state", state.optimizer[stage]),
        ("state", state.stage_state.get(stage, {})),
        (
            "ones updated by the optimizer",
            updated_ones(rule.optimizer, rule.frozen.trained(stage, params), (1.0, -0.5, 0.25)),
        ),
    ]


def _checksums(ranks: TrainingRanks, trees: Iterable[tuple[str, object]]) -> ByAxes:
    """Digest all bits of named trees, apart for leaves of which ranks keep copies along other data axes.

    All ranks get terms of the same axes, to compare one after the other: of any of the data axes.
    """
    every = ranks.axes.data_axes
    facts: ByAxes = {axes: [] for n in range(len(every), 0, -1) for axes in combinations(every, n)}
    for name, tree in trees:
        sums: dict[tuple[str, ...], list[Tensor]] = {every: []}
        for leaf in tree_leaves(tree):
            sums.setdefault(ranks.copied_over(leaf), []).append(checksum(local(leaf)))
        for axes in facts.keys() & sums.keys():  # nobody has a copy of what is cut over all of them
            facts[axes].append(f"the {name} with the checksum {_digest(sums[axes])}")
    return facts


def _digest(sums: Sequence[Tensor]) -> str:
    if not sums:
        return "none"
    numbers = torch.stack([s.to(sums[0].device) for s in sums]).tolist()
    return sha256(repr(numbers).encode()).hexdigest()[:16]
