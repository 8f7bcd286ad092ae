"""Note what a stage calls, for ranks that hold the same stage to compare: operators, attributes, shapes.

Left out is what may differ where the program is the same: names of groups, numbers of devices, paths.
"""

import inspect
import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from types import CodeType
from typing import Any

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
from ..operators import draws, tensors_in
from ..program import SeenCall

_PLAIN = (
    bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format, type(None), torch.SymInt,
    torch.SymFloat,
)  # fmt: skip


_NAME = re.compile("\0.*?\0")  # of a tensor, in the text of a call


class SeenCalls(TorchDispatchMode):
    """Watches the operators of one evaluation of a stage.

    Args:
        arguments: the tensors that the stage is given, by their paths.
        sizes: for which those of the arguments stand that are symbols.
    """

    supports_higher_order_operators = True

    def __init__(self, arguments: Iterable[tuple[str, torch.Tensor]], sizes: Iterable[int] = ()) -> None:
        super().__init__()
        arguments = list(arguments)
        self._names = {storage(t): f"\0{path}\0" for path, t in arguments}
        self._held: list[Any] = [arguments]  # no later tensor takes the memory of one that has a name
        # Each with the names of its results, and whether it counts if nothing reads them.
        takes = self._seen("takes", [*(t for _, t in arguments), *sizes])
        self._calls: list[tuple[SeenCall, set[str], bool]] = [(takes, set(), True)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, operator = kwargs or {}, schema(func) if isinstance(func, OpOverload) else None
        names = [a.name for a in operator.arguments] if operator else []
        given = [value for n, value in enumerate(args) if names[n : n + 1] != ["group_name"]]
        named = [(name, value) for name, value in sorted(kwargs.items()) if name != "group_name"]
        call = self._seen(str(func) + ("" if torch.is_grad_enabled() else " without gradient"), given + named)
        results = func(*args, **kwargs)
        self._held.append(results)
        number = f"\0{len(self._calls)}\0"
        made = {self._names.setdefault(storage(t), number) for t in tensors_in(results)}
        counts = operator is None or not operator.returns or draws(func, args, kwargs)
        text = f"{' '.join(sorted(made))} = {call.text}"
        self._calls.append((call._replace(text=text, place=place_of_call()), made, counts))
        return results

    def ended(self, results: Iterable[torch.Tensor], functions: Iterable[Any]) -> tuple[SeenCall, ...]:
        """Return the calls that results depend on, the backwards of the user's own Functions, the results.

        What nothing depends on may differ: a mesh looks up the place of this rank by operators.
        """
        last = self._seen("returns", list(results))
        needed, used = set(_NAME.findall(last.text)), [last]
        for call, made, counts in reversed(self._calls):
            if counts or made & needed:
                needed.update(_NAME.findall(call.text))
                used.append(call)
        numbers: dict[str, str] = {}

        def numbered(name: re.Match[str]) -> str:
            text = name[0].strip("\0")
            return numbers.setdefault(text, f"%{len(numbers)}") if text.isdecimal() else text

        *calls, returned = (c._replace(text=_NAME.sub(numbered, c.text)) for c in reversed(used))
        return (*calls, *sorted(map(_backward_of, functions)), returned)

    def _seen(self, name: str, values: Sequence[Any]) -> SeenCall:
        """Write a call, in which the names of tensors stand between NUL characters."""
        constants: list[torch.Tensor] = []
        text = " ".join([name, *(self._text(value, constants) for value in values)])
        return SeenCall(text, constants=tuple(constants))

    def _text(self, value: Any, constants: list[torch.Tensor]) -> str:
        """Write an argument; add to ``constants`` what is neither given to the stage nor made by it."""
        if isinstance(value, list | tuple):
            return f"({', '.join([self._text(inner, constants) for inner in value])})"
        if isinstance(value, torch.device):
            return value.type
        if not isinstance(value, torch.Tensor):
            return repr(value) if isinstance(value, _PLAIN) else type(value).__name__
        grad = " with gradient" if value.requires_grad else ""
        tensor = part_of(value) if isinstance(value, dtensor_class()) else value
        kind = f"{str(tensor.dtype)[6:]}{grad}"
        if tensor.layout is not torch.strided or tensor.is_nested or is_wrapped(tensor):
            return kind
        name = self._names.get(storage(tensor), "constant")
        if name == "constant" and not isinstance(tensor, FakeTensor):
            constants.append(tensor)
        return f"{name}: {kind}{list(tensor.shape)} {tensor.stride()} + {tensor.storage_offset()}"


def _backward_of(node: Any) -> SeenCall:
    """Describe the backward of an ``autograd.Function``: its code, and the numbers that its forward keeps."""
    cls = function_of(node)
    numbers = {
        name: kept
        for name, kept in sorted(vars(node).items())
        if isinstance(kept, int | float | torch.SymInt | torch.SymFloat)
    }
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
