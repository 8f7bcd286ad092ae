"""Describe the facts that ranks that train together compare first: options, and values of states."""

from collections.abc import Mapping
from hashlib import sha256

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

_CUT_FROM: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by the step of a state: texts on whole parameters


def note_whole(ranks: TrainingRanks, step: Tensor, params: Mapping[int, object]) -> None:
    """Note checksums of the parameters that a state of this ``step`` is cut from, for its first step."""
    if step.is_meta:  # of a state that no step begins from
        return
    _CUT_FROM[step] = [
        f"the parameters of stage {s} with the checksum {_checksum(ranks, tree)}"
        for s, tree in sorted(params.items())
    ]


def start_facts(rule: UpdateRule, ranks: TrainingRanks, state: TrainState) -> tuple[str, str]:
    """Write the terms that all ranks have to share, and those that the data ranks of a stage have to share.

    A user's own optimizer is known only by name, so that ranks also compare how it updates ones. Reads
    numbers of the device; ranks compare them once. A state without values, of a step that is lowered, has
    none to compare.
    """
    if ranks.world.size == 1 or state.step.is_meta:
        return "", ""
    scale = ", ".join(f"{name} {value.item():g}" for name, value in sorted(state.scale.items()))
    common = [
        *rule.numbers_text,
        f"state of step {int(state.step)}{f' with the scale {scale}' if scale else ''}",
    ]
    trees = (
        [(f"{name} of stage {s}", tree) for s in ranks.stages for name, tree in _trees(rule, state, s)]
        if ranks.data.size > 1
        else []
    )
    data_facts = [f"the {name} with the checksum {_checksum(ranks, tree)}" for name, tree in trees]
    data_facts += _CUT_FROM.get(state.step, [])
    for s in ranks.stages if ranks.data.size > 1 else ():
        names = rule.frozen.names(s, Signature.of(state.params[s]))
        data_facts.append(f"{', '.join(names) or 'nothing'} of stage {s} frozen")
    return "; ".join(common), "; ".join(data_facts)


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


def _checksum(ranks: TrainingRanks, tree: object) -> str:
    """Digest all bits of the leaves of which every data rank keeps the same."""
    sums = [checksum(local(leaf)) for leaf in tree_leaves(tree) if ranks.is_whole(leaf)]
    if not sums:
        return "none"
    numbers = torch.stack([s.to(sums[0].device) for s in sums]).tolist()
    return sha256(repr(numbers).encode()).hexdigest()[:16]
