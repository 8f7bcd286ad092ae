"""Make block masks of flex attention nodes of trees: their tensors, and those that the mask function reads.

A mask of several rows is cut along axis 0 as other inputs are. Its function is called with the number of a
row in the whole batch, so that it reads the right rows of the tensors that it has captured, itself or as
attributes of an object. Tensors that it reads from elsewhere keep the values of the trace.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator
from copy import copy
from functools import cache, partial
from types import CellType, FunctionType, ModuleType
from typing import Any

import optree
import torch

from .tree import NAMESPACE, PLAIN

_templates: dict[str, Any] = {}  # functions of masks without their tensors, by key
_keys: dict[Any, str] = {}


@cache
def register_mask(kind: Any) -> None:
    """Make the class ``BlockMask`` a node of trees."""
    optree.register_pytree_node(kind, _flatten, partial(_unflatten, kind), namespace=NAMESPACE)


def whole_leaves(mask: Any) -> list[bool]:
    """Tell of each leaf of a mask whether every microbatch takes it whole."""
    (blocks, rows, captured), _ = _flatten(mask)
    return [rows is None] * len(blocks) + [False] * (rows is not None) + [True] * len(captured)


class MaskFunction:
    """A mask function with other captured tensors, for some rows of the batch that it was written for.

    Args:
        key: of its template.
        rows: numbers of rows; None for a mask that all rows share.
        captured: the tensors.
    """

    def __init__(self, key: str, rows: torch.Tensor | None, captured: tuple[torch.Tensor, ...]) -> None:
        if key not in _templates:
            raise ValueError(
                f"the mask function {key} is known to its process alone; give the mask to each stage that"
                " needs it, extras={stage: mask}"
            )
        self.key, self.rows, self.captured = key, rows, captured

    def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        function = _put_together(_templates[self.key], iter(self.captured))
        return function(b if self.rows is None else self.rows[b], h, q, kv)

    @classmethod
    def of(cls, mask: Any) -> MaskFunction:
        """Take the function of a mask apart."""
        if isinstance(mask.mask_mod, cls):
            return mask.mask_mod
        captured: list[torch.Tensor] = []
        template, count = _taken_apart(mask.mask_mod, captured), len(mask.kv_num_blocks)
        if template not in _keys:
            name = getattr(mask.mask_mod, "__name__", "mask")
            _keys[template] = f"{name}, {len(_keys)} of process {os.getpid()}"
            _templates[_keys[template]] = template
        rows = torch.arange(count, device=mask.kv_num_blocks.device) if count > 1 else None
        return cls(_keys[template], rows, tuple(captured))


def _flatten(mask: Any) -> tuple[Any, Any]:
    function, attributes = MaskFunction.of(mask), {**vars(mask)}
    del attributes["mask_mod"]
    others = {name: v for name, v in attributes.items() if isinstance(v, tuple | bool | None)}
    blocks = {name: v for name, v in attributes.items() if name not in others}
    children = tuple(blocks.values()), function.rows, function.captured
    return children, (tuple(blocks), tuple(others.items()), function.key)


def _unflatten(kind: Any, context: Any, children: Any) -> Any:
    (names, others, key), (blocks, rows, captured) = context, children
    mask = kind.__new__(kind)
    vars(mask).update(zip(names, blocks, strict=True))
    vars(mask).update(others, mask_mod=MaskFunction(key, rows, tuple(captured)))
    return mask


class _Hole:
    """Stands for a tensor in a template."""


def _taken_apart(value: Any, tensors: list[torch.Tensor], names: tuple[str, ...] = ()) -> Any:
    """Take the tensors out of a function and the values that it captures: a hashable template of the rest.

    Args:
        names: those that the function around the value reads, attributes among them.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Hole
    if isinstance(value, FunctionType):
        held = tuple(cell.cell_contents for cell in value.__closure__ or ())
        bare = FunctionType, value.__code__, _Same(value.__globals__)
        parts = held, value.__defaults__ or (), value.__kwdefaults__ or {}
        return *bare, _taken_apart(parts, tensors, value.__code__.co_names)
    if isinstance(value, partial):
        return partial, _taken_apart((value.func, value.args, value.keywords), tensors)
    if type(value) is dict:
        return dict, _taken_apart(tuple(value.items()), tensors, names)
    if type(value) in (tuple, list):
        return type(value), *(_taken_apart(inner, tensors, names) for inner in value)
    return _object_apart(value, tensors, names)


def _object_apart(value: Any, tensors: list[torch.Tensor], names: tuple[str, ...]) -> Any:
    """Take the tensors out of those attributes of an object that a function reads."""
    call = type(value).__call__ if callable(value) else None
    read = {*names, *(call.__code__.co_names if isinstance(call, FunctionType) else ())}
    attributes = {} if isinstance(value, type | ModuleType) else {**getattr(value, "__dict__", {})}
    for kind in ("_parameters", "_buffers"):  # of an nn.Module
        attributes |= attributes.get(kind, {})
    attributes = {name: attributes[name] for name in sorted(read & attributes.keys())}
    held = {name: v for name, v in attributes.items() if isinstance(v, torch.Tensor)}
    # The text tells apart what is equal, 1 and True, and attributes that have changed.
    text = repr(
        (value if type(value) in PLAIN else None, [v for v in attributes.values() if type(v) in PLAIN])
    )
    kept = value if isinstance(value, Hashable) else _Same(value)
    return (_Same, kept, text, _taken_apart(held, tensors)) if held else (None, kept, text)


class _Same:
    """Stands for an object in a template, and equals another that stands for the same object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _put_together(template: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Make the function of a template with these tensors: the inverse of `_taken_apart`."""
    if template is _Hole:
        return next(tensors)
    kind, *rest = template
    if kind is FunctionType:
        code, known, parts = rest
        held, defaults, named = _put_together(parts, tensors)
        function = FunctionType(code, known.value, None, defaults or None, tuple(map(CellType, held)))
        function.__kwdefaults__ = named or None
        return function
    if kind is partial:
        call, args, named = _put_together(rest[0], tensors)
        return partial(call, *args, **named)
    if kind is dict:
        return dict(_put_together(rest[0], tensors))
    if kind in (None, _Same):
        kept = rest[0].value if isinstance(rest[0], _Same) else rest[0]
        if kind is _Same:
            kept = copy(kept)
            vars(kept).update(_put_together(rest[2], tensors))
        return kept
    return kind(_put_together(inner, tensors) for inner in rest)
