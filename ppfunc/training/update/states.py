"""Combine the states of stages over data ranks, and change them between steps."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch

from ppfunc._checks import shown
from ppfunc.runtime.ports.protocols import Collective, Wait
from ppfunc.runtime.values.buffers import Leaves
from ppfunc.stage.layout import local
from ppfunc.stage.signature import Signature, differentiable, first_match, leaf_names, require_reachable
from ppfunc.stage.tree import tree_flatten, tree_map

from ..optim.protocols import Tree
from .ranks import TrainingRanks

ReduceState = Mapping[str, str]
"""By patterns of names, as of a shell, alternatives divided by ``|``: ``"mean"`` or ``"sum"``."""

UpdateState = Callable[[int, Any], Any]
"""``(stage, its state) -> its new state``, a tree of the same form."""


class StateRule(NamedTuple):
    """Define how the states of stages go on from one step to the next.

    Args:
        reduce: ``"sum"`` or ``"mean"`` over the data ranks, by pattern of names; None for one data rank.
        update: changes the state of a stage at the end of a step.
    """

    reduce: ReduceState | None
    update: UpdateState | None

    @classmethod
    def of(cls, reduce: Any, update: Any) -> Self:
        """Make the rule of a trainer's arguments.

        Raises:
            TypeError, ValueError: other arguments; a pattern that an earlier one hides.
        """
        if reduce is not None and not (
            isinstance(reduce, Mapping)
            and all(isinstance(name, str) and how in ("mean", "sum") for name, how in reduce.items())
        ):
            raise TypeError(
                f"reduce_state: got {shown(reduce)}, expected 'mean' or 'sum' by pattern of names, such as"
                ' {"*counts": "sum", "*": "mean"}'
            )
        require_reachable("reduce_state", reduce or ())
        if update is not None and not callable(update):
            raise TypeError(f"update_state: got {shown(update)}, expected a function (stage, state) -> state")
        return cls(reduce, update)

    @property
    def text(self) -> str:
        """Write the rule for other ranks to compare."""
        reduced = ", ".join(f"{name} by {how}" for name, how in (self.reduce or {}).items())
        update = getattr(self.update, "__qualname__", type(self.update).__name__)
        if code := getattr(self.update, "__code__", None):  # several lambdas have one name
            update = f"{update} of line {code.co_firstlineno}"
        return f"states {reduced or 'apart'}{f', then {update}' if self.update else ''}"

    def reductions(self, stage: int, tree: Tree) -> list[str]:
        """Return ``"mean"`` or ``"sum"`` for every leaf of a state.

        Raises:
            ValueError: a leaf that no pattern matches, or one of booleans.
        """
        signature, patterns, kinds = Signature.of(tree), self.reduce or {}, []
        for name, leaf in zip(leaf_names(signature), signature.leaves, strict=True):
            pattern = first_match(name, patterns)
            if pattern is None or leaf.dtype is torch.bool:
                got = f"{name!r} of {leaf.dtype}" if pattern else f"no pattern that matches {name!r}"
                raise ValueError(
                    f"reduce_state: got {got} for the state of stage {stage}, expected numbers, and a mean or"
                    ' a sum for each: add "*": "mean"'
                )
            kinds.append(patterns[pattern])
        return kinds

    def require_summable(self, stage: int, tree: Tree) -> None:
        """Raise ValueError for a state before the first step whose changes cannot be summed, nor averaged."""
        ways, leaves = self.reductions(stage, tree), map(local, tree_flatten(tree)[0])
        names = leaf_names(Signature.of(tree))
        for name, way, leaf in zip(names, ways, leaves, strict=True):
            if way == "sum" and not leaf.is_meta and not leaf.isfinite().all():
                raise ValueError(
                    f"reduce_state: got {name!r} of stage {stage}, which begins with numbers that are not"
                    " finite, so that their changes have no sum; begin with finite numbers, or take 'mean'"
                )

    def begin(
        self, ranks: TrainingRanks, stage: int, tree: Tree, before: Leaves, after: Leaves
    ) -> Callable[[], Leaves]:
        """Begin to combine the state of a stage over the data ranks: average it, or sum its changes.

        Args:
            tree: the state that the caller gave, for its layouts.
            before, after: the leaves of this rank before and after the step.

        Returns:
            A function that waits, and returns the new leaves.
        """
        given, treedef = tree_flatten(tree)
        new, waits = list(after), list[Wait]()
        alike: dict[tuple[Collective, bool], list[int]] = {}
        for n, leaf in enumerate(given) if ranks.data.size > 1 else ():
            if (over := ranks.summed_over(leaf).ranks).size > 1:
                alike.setdefault((over, differentiable(leaf.dtype)), []).append(n)
        ways = self.reductions(stage, tree) if alike else []
        for (over, _), numbers in alike.items():
            terms = [_term(ways[n], before[n], after[n], over.size) for n in numbers]
            flat = torch.cat([term.reshape(-1) for term in terms])
            waits.append(over.all_reduce(flat))
            sums = flat.split([term.numel() for term in terms])
            totals = [total.view(term.shape) for total, term in zip(sums, terms, strict=True)]
            waits.append(partial(_renew, new, before, ways, totals, numbers, over.size))

        def finish() -> Leaves:
            for wait in waits:
                wait()
            return tuple(new) if self.update is None else self._updated(stage, treedef.unflatten(new))

        return finish

    def _updated(self, stage: int, state: Tree) -> Leaves:
        assert self.update is not None
        changed = self.update(stage, tree_map(torch.clone, state))  # it may write into its own
        old, new = Signature.of(state).without_grad(), Signature.of(changed, "update_state").without_grad()
        if new != old:
            raise ValueError(
                f"update_state({stage}, ...): got {new}, expected {old}, the form of the state before"
            )
        return tuple(leaf.detach() for leaf in map(local, tree_flatten(changed)[0]))


def _term(way: str, before: torch.Tensor, after: torch.Tensor, ranks: int) -> torch.Tensor:
    """Compute what is summed over ranks for a leaf: float64, or int64 of integers.

    A mean sums the numbers themselves, since changes would lose those that began far away, in terms so small
    that their sum stays below the largest number.
    """
    old, new = _wide(before), _wide(after)
    if way == "sum":
        return torch.where(new == old, torch.zeros_like(new), new - old)  # 0 of infinities
    return (
        new / 2.0 ** (ranks - 1).bit_length()
        if new.is_floating_point()
        else torch.stack([new // ranks, new % ranks])
    )


def _renew(
    new: list[torch.Tensor], before: Leaves, ways: Sequence[str], totals: Sequence[torch.Tensor],
    numbers: Sequence[int], ranks: int,
) -> None:  # fmt: skip
    """Make the leaves of these numbers of the sums of their terms over so many ranks."""
    for n, total in zip(numbers, totals, strict=True):
        if ways[n] == "sum":
            total = _wide(before[n]) + total
        elif total.is_floating_point():
            total = total / ranks * 2.0 ** (ranks - 1).bit_length()
        else:
            total = total[0] + total[1] // ranks
        new[n] = (torch.view_as_complex(total) if before[n].is_complex() else total).to(before[n].dtype)


def _wide(leaf: torch.Tensor) -> torch.Tensor:
    """Convert to float64, complex numbers as pairs, or integers to int64."""
    real = torch.view_as_real(leaf) if leaf.is_complex() else leaf
    return real.double() if real.is_floating_point() else real.long()
