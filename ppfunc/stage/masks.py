"""Carry the functions of block masks as values: a list of operators, and the tensors that they read.

A function is recorded once, when a step begins, on indices alone::

    documents[b, q] == documents[b, kv]    # becomes
    ("%x", "index.Tensor", ("%d", ("%b", "%q"))), ..., ("%z", "eq.Tensor", ("%x", "%y"))

Its tensors are inputs of the step, whole in every microbatch, and as large as they are. A function of other
operators than those of single elements is called for all indices: it is a table of booleans, which is as
large as the scores that it masks.
"""

from typing import Any, Self

import torch

from ._torch import OpOverload, TorchDispatchMode, indexing, schema
from .tree import tree_leaves

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
        program: what it computes.
        tensors: those that it reads.
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
    """Records operators on its inputs, and on what they give."""

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
        """Write an argument as a text, a number, a flag, None, or a tuple of such."""
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
