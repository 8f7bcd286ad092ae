"""Note what a stage calls, for ranks that hold the same stage to compare: operators, attributes, shapes.

Left out is what may differ where the program is the same: names of groups, numbers of devices, paths.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from hashlib import sha256
from types import CodeType
from typing import Any, NamedTuple

import torch

from .._torch import (
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    dtensor_class,
    function_of,
    is_wrapped,
    part_of,
    schema,
    storage,
)
from ..errors import place_of_call
from ..program import SeenCall
from .purity import draws, tensors_in

_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format, type(None))


class _Noted(NamedTuple):
    """Describe a call before its tensors have their last numbers.

    Args:
        pieces: of its text; a number stands for a tensor that the call of this number has made.
        constants: as of :class:`SeenCall`.
        place: likewise.
        made: the numbers of its results, that of the call, or of one whose memory it views or writes into.
        counts: whether it counts for the program if nothing reads its results.
    """

    pieces: list[str | int]
    constants: list[torch.Tensor]
    place: str = ""
    made: frozenset[str | int] = frozenset()
    counts: bool = True


class SeenCalls(TorchDispatchMode):
    """Watches the operators of one evaluation of a stage.

    Args:
        arguments: the tensors that the stage is given, by their paths.
    """

    supports_higher_order_operators = True

    def __init__(self, arguments: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        arguments = list(arguments)
        self._names: dict[int | None, str | int] = {storage(t): path for path, t in arguments}
        self._held: list[Any] = [arguments]  # no later tensor takes the memory of one that has a name
        self._calls = [self._noted("takes", *(t for _, t in arguments))]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, operator = kwargs or {}, schema(func) if isinstance(func, OpOverload) else None
        names = [a.name for a in operator.arguments] if operator else []
        given = (value for n, value in enumerate(args) if names[n : n + 1] != ["group_name"])
        named = ((name, value) for name, value in sorted(kwargs.items()) if name != "group_name")
        call = self._noted(
            str(func) + ("" if torch.is_grad_enabled() else " without gradient"), *given, *named
        )
        results = func(*args, **kwargs)
        self._held.append(results)
        places = [storage(t) for t in tensors_in(results)]
        made = frozenset(self._names.setdefault(at, len(self._calls)) for at in places)
        counts = operator is None or not operator.returns or draws(func, args, kwargs)
        self._calls.append(call._replace(place=place_of_call(), made=made, counts=counts))
        return results

    def ended(self, results: Iterable[torch.Tensor], functions: Iterable[Any]) -> tuple[SeenCall, ...]:
        """Return the calls that results depend on, the backwards of the user's own Functions, the results.

        What nothing depends on may differ: a mesh looks up the place of this rank by operators.
        """
        last = self._noted("returns", *results)
        needed, used = set(last.pieces), [last]
        for call in reversed(self._calls):
            if call.counts or call.made & needed:
                needed.update(call.pieces)
                used.append(call)
        numbers: dict[str | int, str] = {}

        def written(call: _Noted) -> SeenCall:
            for number in sorted(n for n in call.made if isinstance(n, int)):
                numbers.setdefault(number, f"%{len(numbers)}")
            text = "".join(p if isinstance(p, str) else numbers[p] for p in call.pieces)
            return SeenCall(text, call.place, tuple(call.constants))

        *calls, returned = map(written, reversed(used))
        return (*calls, *sorted(map(_backward_of, functions)), returned)

    def _noted(self, name: str, *values: Any) -> _Noted:
        call = _Noted([name], [])
        for value in values:
            call.pieces.append(" ")
            self._write(value, call)
        return call

    def _write(self, value: Any, call: _Noted) -> None:
        if isinstance(value, torch.Tensor):
            self._write_tensor(value, call)
        elif isinstance(value, list | tuple):
            for n, inner in enumerate(value):
                call.pieces.append(", " if n else "(")
                self._write(inner, call)
            call.pieces.append(")" if value else "()")
        elif isinstance(value, torch.device):
            call.pieces.append(value.type)
        else:
            call.pieces.append(repr(value) if isinstance(value, _PLAIN) else type(value).__name__)

    def _write_tensor(self, tensor: torch.Tensor, call: _Noted) -> None:
        grad = " with gradient" if tensor.requires_grad else ""
        tensor = part_of(tensor) if isinstance(tensor, dtensor_class()) else tensor
        kind = f"{str(tensor.dtype)[6:]}{grad}"
        if tensor.layout is not torch.strided or tensor.is_nested or is_wrapped(tensor):
            call.pieces.append(kind)
            return
        name = self._names.get(storage(tensor), "constant")
        if name == "constant" and not isinstance(tensor, FakeTensor):
            call.constants.append(tensor)
        form = f": {kind}{list(tensor.shape)} {tensor.stride()} + {tensor.storage_offset()}"
        call.pieces.extend([name, form])


def _backward_of(node: Any) -> SeenCall:
    """Describe the backward of an ``autograd.Function``: its code, and the numbers that its forward keeps."""
    cls = function_of(node)
    numbers = {name: kept for name, kept in sorted(vars(node).items()) if isinstance(kept, int | float)}
    code = getattr(inspect.unwrap(cls.backward), "__code__", None)
    if code is None:
        return SeenCall(f"{cls.__qualname__} {numbers}")
    digest = sha256(_code(code).encode(errors="surrogatepass")).hexdigest()[:16]
    place = f", written at {code.co_filename}:{code.co_firstlineno}"
    return SeenCall(f"the backward {digest} of {cls.__qualname__} {numbers}", place)


def _code(code: CodeType) -> str:
    """Write a code object without places in files."""
    constants = [
        _code(c) if isinstance(c, CodeType) else repr(sorted(map(repr, c)) if isinstance(c, frozenset) else c)
        for c in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {constants}"
