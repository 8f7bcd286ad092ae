"""Carry numbers, texts, flags and block masks among the tensors of a step's inputs.

A number, a text or a flag is a part of the structure of a tree: a program is traced for its value, as for the
shapes of tensors. So are the values of a tensor of integers by which shapes are made, where they are asked
for. A block mask of flex attention is carried as its tensors, its function as a list of
operators and the tensors that they read. A mask of several rows is cut along axis 0 as other inputs are; one
that was made with ``B=None`` or ``H=None`` is the same for all rows or heads.

The function of a mask is recorded once, when a step begins, on indices alone::

    documents[b, q] == documents[b, kv]    # becomes
    ("%x", "index.Tensor", ("%d", ("%b", "%q"))), ..., ("%z", "eq.Tensor", ("%x", "%y"))

Its tensors are inputs of the step, whole in every microbatch, and as large as they are. A function of other
operators than those of single elements is called for all indices: it is a table of booleans, which is as
large as the scores that it masks.
"""

from typing import Any, NamedTuple, Self

import optree
import torch

from ppfunc._checks import limited

from ._torch import OpOverload, TorchDispatchMode, indexing, schema
from .tree import BLOCK_MASKS, NAMESPACE, PLAIN, register_leafless, tree_flatten, tree_leaves, tree_map


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


class KnownTensor:
    """Stands for a tensor of integers or flags whose values are a part of a tree, as a node without leaves.

    Args:
        dtype, shape: dtype and shape of the tensor.
        numbers: the elements of the tensor, in their order.
    """

    __slots__ = ("dtype", "numbers", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...], numbers: tuple[int, ...]) -> None:
        self.dtype, self.shape, self.numbers = dtype, tuple(shape), tuple(numbers)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        """Read the values of a tensor.

        Raises:
            ValueError: it has none, or they are no integers or flags.
        """
        if tensor.is_meta or tensor.is_floating_point() or tensor.is_complex():
            where = " on the device meta" if tensor.is_meta else ""
            raise ValueError(
                f"constants: got a tensor of {tensor.dtype}{where}, expected integers or flags with values"
            )
        numbers = tuple(tensor.detach().flatten().tolist())
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), numbers)

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)} {limited(str(list(self.numbers)), 80)}"

    def made(self, device: torch.device) -> torch.Tensor:
        """Make the tensor."""
        dtype = getattr(torch, self.dtype)
        return torch.tensor(self.numbers, dtype=dtype, device=device).reshape(self.shape)


def by_value(tree: Any) -> Any:
    """Replace tensors by their values."""
    return tree_map(lambda leaf: KnownTensor.of(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


register_leafless(
    KnownTensor,
    lambda node: (node.dtype, node.shape, node.numbers),
    lambda kept: KnownTensor(*kept),
)


class MaskParts(NamedTuple):
    """Stands for a block mask in a tree.

    Args:
        blocks: the tensors of the mask, by attribute.
        rows: the numbers of its rows in the whole batch, int64[B]; None where all rows share it.
        tensors: the tensors that its function reads; every microbatch takes them whole.
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
    """Put back the values that :func:`with_constants` has replaced; a tree without any is returned itself."""
    leaves, treedef = optree.tree_flatten(tree, is_leaf=_stands_for, namespace=NAMESPACE)
    if not any(map(_stands_for, leaves)):
        return tree
    return treedef.unflatten(leaf.value if _stands_for(leaf) else leaf for leaf in leaves)


def with_tensors(tree: Any, device: torch.device) -> Any:
    """Make the tensors whose values are known."""
    leaves, treedef = optree.tree_flatten(tree, is_leaf=is_known, namespace=NAMESPACE)
    return treedef.unflatten(leaf.made(device) if is_known(leaf) else leaf for leaf in leaves)


def leaves_and_known(tree: Any) -> list[Any]:
    """Return the leaves of a tree, with the tensors whose values are known."""
    return optree.tree_leaves(tree, is_leaf=is_known, namespace=NAMESPACE)


def is_known(value: Any) -> bool:
    """Tell whether values stand in the place of a tensor."""
    return type(value) is KnownTensor


def _stands_for(value: Any) -> bool:
    return type(value) is Constant or type(value) is MaskParts


# -- the functions of block masks

Program = tuple[Any, ...]
"""Names of the tensors, operators with the names of their results, and the name of the last."""

_INPUTS = "%b", "%h", "%q", "%kv", "%rows"
# Beside operators on elements.
_OTHERS = {"index.Tensor", "floor_divide.default", "_to_copy.default"} | {
    f"{name}.default" for name in ("new_ones", "new_zeros", "full_like", "ones_like", "zeros_like")
}


class MaskFunction:
    """The function of a block mask.

    Args:
        program: the operators of the function.
        tensors: the tensors that the function reads.
        rows: the numbers of its rows in the whole batch, int64[B]; None where all rows share the mask.
    """

    def __init__(
        self, program: Program, tensors: tuple[torch.Tensor, ...], rows: torch.Tensor | None
    ) -> None:
        self.program, self.tensors, self.rows = program, tensors, rows

    @classmethod
    def of(cls, mask: Any) -> Self:
        """Record the function of a block mask."""
        from torch.nn.attention.flex_attention import create_mask

        function, device = mask.mask_mod, mask.kv_num_blocks.device
        if isinstance(function, cls):
            return function
        (b, h), (q, kv) = mask.kv_num_blocks.shape[:2], mask.seq_lengths
        rows = torch.arange(b, device=device) if b > 1 else None
        try:
            return cls(*_recorded(function, rows, h, device), rows)
        except Exception:  # the table calls it again, and raises what it raises
            table = create_mask(function, b, h, q, kv, device)
            return cls(*_recorded(lambda *at: table[at], rows, h, device), rows)

    def __call__(self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        names, operators, result = self.program
        values = dict(zip((*_INPUTS, *names), (b, h, q, kv, self.rows, *self.tensors), strict=True))
        for name, operator, args, options in operators:
            args, options = _decoded(args, values), {key: _decoded(v, values) for key, v in options}
            values[name] = _operator(operator)(*args, **options)
        return values[result]


def _recorded(
    function: Any, rows: torch.Tensor | None, heads: int, device: torch.device
) -> tuple[Program, tuple[torch.Tensor, ...]]:
    """Record a function as a program, and the tensors that it reads."""
    b, h, q, kv = torch.zeros(4, dtype=torch.int64, device=device).unbind()
    recorder = _Recorder((b, h, q, kv, rows))
    with torch.no_grad(), indexing(), recorder:
        result = function(b * 0 if rows is None else rows[b], h if heads > 1 else h * 0, q, kv)
    last = recorder.encoded(result)
    return (tuple(recorder.read), tuple(recorder.program), last), tuple(recorder.read.values())


class _Recorder(TorchDispatchMode):
    """Records operators on its inputs, and on their results."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.values = dict(zip(_INPUTS, inputs, strict=True))
        self.names = {id(t): name for name, t in self.values.items()}
        self.read: dict[str, torch.Tensor] = {}
        self.program: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(id(t) in self.names for t in tensors):
            operator = str(func).removeprefix("aten.")
            if _operator(operator) is not func:
                raise TypeError(f"got {func}, expected an operator on elements")
            options = tuple((key, self.encoded(v)) for key, v in (kwargs or {}).items())
            args = self.encoded(args)
            self.program.append((self._named(result), operator, args, options))
        return result

    def _named(self, tensor: torch.Tensor) -> str:
        name = self.names[id(tensor)] = f"%{len(self.values)}"
        self.values[name] = tensor  # which keeps its identity
        return name

    def encoded(self, value: Any) -> Any:
        """Write an argument as a plain value: a text, a number, a flag, ``None``, or a tuple of such."""
        match value:
            case torch.Tensor():
                if id(value) not in self.names:
                    name = self._named(value)
                    self.read[name] = value.detach().to(self.values["%q"].device)
                return self.names[id(value)]
            case tuple() | list():
                return tuple(map(self.encoded, value))
            case torch.dtype():
                return str(value)
            case None | bool() | int() | float():
                return value
        raise TypeError(f"got {value!r} as an argument, expected a tensor or a number")


def _operator(name: str) -> OpOverload:
    """Return the operator of a program by its name: one that only computes elements."""
    packet, _, overload = name.partition(".")
    operator: OpOverload = getattr(getattr(torch.ops.aten, packet), overload)
    elements = torch.Tag.pointwise in operator.tags and torch.Tag.nondeterministic_seeded not in operator.tags
    if schema(operator).is_mutable or not (elements or name in _OTHERS):
        raise TypeError(f"got {name}, expected an operator on elements")
    return operator


def _decoded(value: Any, values: dict[str, Any]) -> Any:
    if isinstance(value, tuple):
        return [_decoded(inner, values) for inner in value]
    if isinstance(value, str):
        return values[value] if value in values else getattr(torch, value.removeprefix("torch."))
    return value
