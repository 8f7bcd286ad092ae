"""Carry what inputs of a step hold beside tensors: numbers, texts and flags, and block masks.

A number, a text or a flag is a part of the structure of a tree: a program is traced for its value, as for the
shapes of tensors. A block mask of flex attention is carried as its tensors and those that its function reads,
see `masks`. A mask of several rows is cut along axis 0 as other inputs are; one that was made with ``B=None``
or ``H=None`` is the same for all rows or heads.
"""

from typing import Any, NamedTuple, Self

import optree
import torch

from .masks import MaskFunction
from .tree import BLOCK_MASKS, NAMESPACE, PLAIN, register_leafless, tree_flatten


class Constant:
    """Stands for a number, a text or a flag in a tree, as a node without leaves.

    Args:
        value: itself, or a tuple of numbers, texts and flags.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


# The text tells apart what is equal: 1, 1.0 and True.
register_leafless(Constant, lambda node: (repr(node.value), node.value), lambda kept: Constant(kept[1]))


class MaskParts(NamedTuple):
    """Stands for a block mask in a tree.

    Args:
        blocks: its tensors, by attribute.
        rows: the numbers of its rows in the whole batch, int64[B]; None where all rows share it.
        tensors: those that its function reads; every microbatch takes them whole.
        rest: the program of its function, and its other attributes.
    """

    blocks: dict[str, torch.Tensor]
    rows: torch.Tensor | None
    tensors: tuple[torch.Tensor, ...]
    rest: Constant

    @classmethod
    def of(cls, mask: Any) -> Self:
        """Take a block mask apart."""
        attributes, function = {**vars(mask)}, MaskFunction.of(mask)
        del attributes["mask_mod"]
        blocks = {name: v for name, v in attributes.items() if isinstance(v, torch.Tensor)}
        others = tuple((name, v) for name, v in attributes.items() if name not in blocks)
        return cls(blocks, function.rows, function.tensors, Constant((function.program, *others)))

    @property
    def value(self) -> Any:
        """Put the block mask together again."""
        from torch.nn.attention.flex_attention import BlockMask

        (program, *others), mask = self.rest.value, BlockMask.__new__(BlockMask)
        function = MaskFunction(program, self.tensors, self.rows)
        vars(mask).update(self.blocks, **dict(others), mask_mod=function)
        return mask

    @property
    def wholes(self) -> list[bool]:
        """Tell of each leaf whether every microbatch takes it whole."""
        shared = self.rows is None
        return [shared] * (len(self.blocks) + (not shared)) + [True] * len(self.tensors)


def with_constants(tree: Any, name: str = "tree", *, masks_alone: bool = False) -> Any:
    """Replace numbers, texts, flags and block masks; a tree without any is returned itself.

    >>> with_constants({"scale": 2.0})["scale"], with_constants((1, True))
    (2.0, (1, True))
    """

    def replaced(leaf: Any) -> Any:
        # The class of masks is not imported for this.
        if type(leaf).__name__ == "BlockMask" and type(leaf).__module__ == BLOCK_MASKS:
            return MaskParts.of(leaf)
        return Constant(leaf) if type(leaf) in PLAIN and not masks_alone else leaf

    leaves, treedef = tree_flatten(tree, name)
    stand_ins = list(map(replaced, leaves))
    return treedef.unflatten(stand_ins) if any(map(_stands_for, stand_ins)) else tree


def without_constants(tree: Any) -> Any:
    """Put back what :func:`with_constants` has replaced; a tree without any is returned itself."""
    leaves, treedef = optree.tree_flatten(tree, is_leaf=_stands_for, namespace=NAMESPACE)
    if not any(map(_stands_for, leaves)):
        return tree
    return treedef.unflatten(leaf.value if _stands_for(leaf) else leaf for leaf in leaves)


def _stands_for(value: Any) -> bool:
    return type(value) is Constant or type(value) is MaskParts
