"""Combine the states of stages over data ranks, and change them between steps."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch

from ppfunc._checks import shown
from ppfunc.runtime.execution.buffers import Leaves
from ppfunc.runtime.transport.collective import Collective, Wait
from ppfunc.stage.layout import local
from ppfunc.stage.patterns import first_match, require_reachable
from ppfunc.stage.signature import Signature, leaf_names
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

    def begin(
        self, ranks: TrainingRanks, stage: int, tree: Tree, before: Leaves, after: Leaves
    ) -> Callable[[], Leaves]:
        """Begin to combine the state of a stage over the data ranks: sum or average its changes in a step.

        Args:
            tree: the state that the caller gave, for its layouts.
            before, after: the leaves of this rank before and after the step.

        Returns:
            A function that waits, and returns the new leaves.
        """
        given, treedef = tree_flatten(tree)
        new, waits = list(after), list[Wait]()
        alike: dict[tuple[Collective, torch.dtype], list[int]] = {}
        for n, leaf in enumerate(given) if ranks.data.size > 1 else ():
            if (over := ranks.summed_over(leaf).ranks).size > 1:
                alike.setdefault((over, leaf.dtype), []).append(n)
        ways = self.reductions(stage, tree) if alike else []
        for (over, _), numbers in alike.items():
            flat = torch.cat([_change(before[n], after[n]) for n in numbers])
            waits.append(over.all_reduce(flat))
            changes = flat.split([after[n].numel() for n in numbers])
            waits.append(partial(_add, new, before, ways, changes, numbers, over.size))

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


def _change(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Subtract, integers in int64. Equal elements give 0, infinities as well."""
    if not (before.is_floating_point() or before.is_complex()):
        before, after = before.long(), after.long()
    change = after - before
    return torch.where(after == before, torch.zeros_like(change), change).reshape(-1)


def _add(
    new: list[torch.Tensor], before: Leaves, ways: Sequence[str], changes: Sequence[torch.Tensor],
    numbers: Sequence[int], ranks: int,
) -> None:  # fmt: skip
    """Add the changes of so many ranks, or their mean, to the leaves of these numbers."""
    for n, change in zip(numbers, changes, strict=True):
        if ways[n] == "mean":
            change = change / ranks if change.is_floating_point() or change.is_complex() else change // ranks
        new[n] = (before[n] + change.view(before[n].shape)).to(before[n].dtype)
