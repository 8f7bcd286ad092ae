"""Say how gradients become new parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ppfunc.runtime.rng import preserve_rng
from ppfunc.runtime.ties import Tied, leaf_names
from ppfunc.stage import Signature, Stage
from ppfunc.stage.layout import local
from ppfunc.stage.module import frozen_in, frozen_untold
from ppfunc.stage.signature import differentiable, flatten
from ppfunc.stage.tree import tree_flatten, tree_leaves, tree_map, tree_paths

from .precision import LossScale, Precision
from .protocols import Optimizer, Tree, text_of
from .ranks import ShardWhat

OnNonfinite = Literal["skip", "raise", "ignore"]


class UpdateRule(NamedTuple):
    """How gradients become new parameters.

    Args:
        optimizer: runs stage by stage.
        clip: largest norm of all gradients together.
        norm_type: p of the norm.
        scale: of the loss.
        precision: the dtypes.
        on_nonfinite: what to do where loss or norm are not finite.
        shard: whether each data rank keeps, and updates, a part of the optimizer's state, or also of the parameters.
    """

    optimizer: Optimizer
    clip: float
    norm_type: float
    scale: LossScale | None
    precision: Precision
    on_nonfinite: OnNonfinite
    shard: ShardWhat

    @property
    def options_text(self) -> str:
        """The options that all ranks have to agree on."""
        dtypes = "/".join(str(dtype) for dtype in (self.precision.compute, self.precision.reduce, self.precision.master))
        scaled = "a scaled loss" if self.scale else "no scale"
        return f"clip {self.clip} of norm {self.norm_type}, {scaled}, {dtypes}, {self.on_nonfinite} what is not finite, shard {self.shard}"

    @property
    def numbers_text(self) -> tuple[str, str]:
        """The numbers of the optimizer and of the scale."""
        return f"optimizer {text_of(self.optimizer)}", f"scale {'none' if self.scale is None else self.scale.text}"

    @property
    def needs_all(self) -> bool:
        """Whether an update needs the gradients of all stages."""
        return not (self.clip == inf and self.scale is None and self.on_nonfinite == "ignore")


def updated_ones(optimizer: Optimizer, params: Tree, gradients: Sequence[float]) -> Tree:
    """Update ones in the place of parameters, of one element each, so that it shows what an optimizer does.

    Args:
        params: their structure, dimensions and dtypes.
        gradients: of every element, in update after update.
    """

    made = tree_map(_one, params)
    with preserve_rng(leaf.device for leaf in tree_leaves(made) if leaf.is_cuda):  # an optimizer may draw
        state = optimizer.init(made)
        for value in gradients:
            grads = tree_map(lambda leaf, value=value: torch.full_like(leaf, value) if differentiable(leaf.dtype) else leaf, made)
            made, state = optimizer.update(grads, state, made)
    return made


def frozen_numbers(stage: Stage | None, params: Tree) -> frozenset[int]:
    """The numbers of the leaves that the module of a stage has frozen now: an update leaves them as they are."""
    names = set(frozen_in(stage)) if stage is not None else set()
    return frozenset(n for n, name in enumerate(leaf_names(Signature.of(params))) if name in names) if names else frozenset()


def require_frozen_alike(stages: Sequence[Stage | None], tied: Tied) -> None:
    """Raise where modules of this process have frozen a parameter at one place, and not at another."""
    frozen = {stage: set(names) for stage, fn in enumerate(stages) if fn is not None and (names := frozen_in(fn))}
    for name, places in tied if frozen else ():
        known = [place for place in places if stages[place[0]] is not None]
        free, fixed = ([p for p in known if (p[1] in frozen.get(p[0], ())) is here] for here in (False, True))
        if free and fixed:
            raise ValueError(
                f"tied[{name!r}]: {fixed[0][1]} of stage {fixed[0][0]} is frozen, {free[0][1]} of stage {free[0][0]} is not, and "
                "both are one parameter; freeze it in both modules, or in none"
            )


def require_frozen_told(stages: Sequence[Stage | None], params: Mapping[int, Tree]) -> None:
    """Raise where a stage does not tell of a parameter that its module has frozen, which an update would change."""
    for stage, tree in params.items():
        if (fn := stages[stage]) is not None and (names := frozen_untold(fn, tree_leaves(tree))):
            told = ", ".join(map(repr, names[:5]))
            raise ValueError(
                f"stages[{stage}]: it calls the function of a module that has frozen {told}, and does not tell, so that weight decay would "
                "act on what is frozen; make it with functools.wraps(that function)"
            )


def require_state_of(rule: UpdateRule, params: Tree, state: Tree, name: str) -> None:
    """Raise where a tree is not what the optimizer of a rule makes for parameters of this form; ``name`` for errors."""
    made, structure = tree_flatten(rule.optimizer.init(tree_map(_one, params)))
    leaves, given = flatten(state, name)
    text = f"which the optimizer {text_of(rule.optimizer)} {{}}; go on with the optimizer whose state it is, or init anew"
    if given != structure:
        theirs, ours = tree_paths(given), tree_paths(structure)
        lacking, further = [p for p in ours if p not in theirs], [p for p in theirs if p not in ours]
        got = f"no {lacking[0]}, {text.format('keeps')}" if lacking else f"{(further or theirs)[0]}, {text.format('does not keep')}"
        raise ValueError(f"{name}: got {got}")
    for path, one, other in zip(tree_paths(structure, name), leaves, made, strict=True):
        if (one.dtype, one.ndim) != (other.dtype, other.ndim):
            got, known = (f"{t.dtype} of {t.ndim} dimensions" for t in (one, other))
            raise ValueError(f"{path}: got {got}, expected {known}, {text.format('keeps')}")


def _one(leaf: Tensor) -> Tensor:
    """Ones of at most one element, of the dimensions and the dtype of a leaf."""
    leaf = local(leaf)
    return torch.ones([min(1, size) for size in leaf.shape], dtype=leaf.dtype, device=leaf.device)
