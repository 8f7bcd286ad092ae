"""Carry numbers, texts and flags among the inputs of a step, as a part of the structure of their tree.

A program is traced for their values, as for the shapes of tensors.
"""

from __future__ import annotations

from typing import Any

import optree

from .tree import BLOCK_MASKS, NAMESPACE, PLAIN, tree_flatten


class Constant:
    """Stands for a number, a text or a flag in a tree, as a node without leaves.

    Args:
        value: itself; of tuples of such, too.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


# The text tells apart what is equal: 1, 1.0 and True.
def _flatten(constant: Any) -> tuple[tuple[()], tuple[str, Any]]:
    return (), (repr(constant.value), constant.value)


optree.register_pytree_node(Constant, _flatten, lambda kept, _: Constant(kept[1]), namespace=NAMESPACE)  # type: ignore[arg-type,index,return-value]


def with_constants(tree: Any, name: str = "tree") -> Any:
    """Replace numbers, texts and flags by constants; a tree without any is returned itself.

    >>> with_constants({"scale": 2.0})["scale"], with_constants((1, True))
    (2.0, (1, True))
    """
    leaves, treedef = tree_flatten(tree, name)
    if (mask := next(filter(is_mask, leaves), None)) is not None:
        from .masks import register_mask

        kind: Any = type(mask)
        register_mask(kind)
        leaves, treedef = tree_flatten(tree, name)
    if not any(type(leaf) in PLAIN for leaf in leaves):
        return tree
    return treedef.unflatten(Constant(leaf) if type(leaf) in PLAIN else leaf for leaf in leaves)


def is_mask(value: Any) -> bool:
    """Tell whether a value is a ``BlockMask`` of flex attention, without importing the class."""
    return type(value).__name__ == "BlockMask" and type(value).__module__ == BLOCK_MASKS


def without_constants(tree: Any) -> Any:
    """Replace constants by their values; a tree without any is returned itself."""
    leaves, treedef = optree.tree_flatten(tree, is_leaf=_is_constant, namespace=NAMESPACE)
    if not any(map(_is_constant, leaves)):
        return tree
    return treedef.unflatten(leaf.value if _is_constant(leaf) else leaf for leaf in leaves)


def _is_constant(value: Any) -> bool:
    return type(value) is Constant
