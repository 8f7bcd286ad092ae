"""Record the programs of a stage as CUDA graphs, once for every microbatch in flight, and replay them.

A graph works in the memory in which it was recorded. That memory belongs to slots, as many as microbatches
were ever in flight at once: a slot holds one from its forward to the end of its backward, so its residuals
stay where they are.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .._torch import copy_each, transforming, version
from ..device import Record, graph_recorder
from ..program import Example, FlatProgram, Gradients, Leaves
from ..signature import Signature


def captured(
    flat: FlatProgram,
    example: Example,
    y: Signature,
    recorder: Callable[[torch.device], Record] = graph_recorder,
) -> FlatProgram:
    """Replay each function of a program, recorded when it first runs in a slot.

    Inputs are copied in and outputs out, so ownership is unchanged. Residuals stay in the slot; the returned
    lease frees it when dropped. Parameters are copied when they are not those of an earlier call, unchanged.
    No shape may depend on values.
    """
    copies: list[_StaticParams] = []  # several where stages share the program

    def forward(params: Leaves, x: Leaves, extras: Leaves) -> tuple[Leaves, tuple[Any, ...]]:
        if transforming():
            raise RuntimeError(
                "got a stage captured in CUDA graphs under a torch.func transform; use the functional engine"
            )
        static = _copy_of(params, copies, example)
        slot = static.free.pop() if static.free else _Slot(example, y, recorder(example.device))
        lease = _Lease(static, slot)
        _fill(slot.x + slot.extras, x + extras)
        outputs, _ = slot.run("forward", partial(flat.forward, static.params, slot.x, slot.extras))
        return _fresh(outputs), (lease,)

    def unrecorded(lease: _Lease) -> Any:
        """Compute residuals outside of a graph, for what runs there: an operator may keep others in one."""
        return flat.forward(lease.static.params, lease.slot.x, lease.slot.extras)[1]

    def pull(name: str, function: Callable[..., Any], residuals: tuple[_Lease], gy: Leaves) -> Any:
        slot = residuals[0].slot
        _fill(slot.gy, gy)
        run = partial(function, slot.results["forward"][1], slot.gy)
        return slot.run(name, run, lambda: function(unrecorded(residuals[0]), slot.gy))

    def backward(residuals: tuple[_Lease], gy: Leaves) -> tuple[Gradients, Gradients]:
        gparams, gx = pull("backward", flat.backward, residuals, gy)
        return _fresh(gparams), _fresh(gx)

    def backward_input(residuals: tuple[_Lease], gy: Leaves) -> tuple[Gradients, tuple[_Lease]]:
        return _fresh(pull("backward_input", flat.backward_input, residuals, gy)[0]), residuals

    def backward_weight(rest: tuple[_Lease]) -> Gradients:
        (lease,) = rest
        run = partial(flat.backward_weight, lease.slot.results["backward_input"][1])

        def outside() -> Any:
            return flat.backward_weight(flat.backward_input(unrecorded(lease), lease.slot.gy)[1])

        return _fresh(lease.slot.run("backward_weight", run, outside))

    functions: Any = forward, backward, backward_input, backward_weight
    for function, traced in zip(functions, flat, strict=True):
        function.__wrapped__ = traced
    return FlatProgram(*functions)


class _Slot:
    """Owns the memory of one microbatch in flight, and the graphs recorded in it."""

    def __init__(self, example: Example, y: Signature, record: Record) -> None:
        groups = (example.x.leaves, example.extra_leaves, [leaf for leaf in y.leaves if leaf.grad])
        self.x, self.extras, self.gy = (
            tuple(torch.empty(leaf.shape, dtype=leaf.dtype, device=example.device) for leaf in leaves)
            for leaves in groups
        )
        self.record = record
        self.results: dict[str, Any] = {}
        self._replays: dict[str, Callable[[], None]] = {}

    def run(self, name: str, function: Callable[[], Any], unrecorded: Callable[[], Any] | None = None) -> Any:
        """Run a function in memory that the next run of the same name overwrites.

        ``unrecorded`` does the same outside of any graph; it is ``function`` unless given.
        """
        if name not in self._replays:
            self.results[name], self._replays[name] = self.record(function, unrecorded or function)
        self._replays[name]()
        return self.results[name]


class _StaticParams:
    """Owns a copy of parameters, and the slots whose recordings read it."""

    def __init__(self, params: Leaves) -> None:
        self.params, self.free, self.lent = params, list[_Slot](), 0
        self._copied: list[tuple[weakref.ref[torch.Tensor], int | None]] = []

    def holds(self, params: Leaves) -> bool:
        """Tell whether these are the tensors that it was filled from, unchanged."""
        pairs = zip(self._copied, params, strict=False)
        return len(self._copied) == len(params) and all(
            seen() is t and count == version(t) for (seen, count), t in pairs
        )

    def fill(self, params: Leaves) -> None:
        _fill(self.params, params)
        self._copied = [(weakref.ref(t), version(t)) for t in params]


class _Lease:
    """Holds a slot in use, which its last reference frees."""

    def __init__(self, static: _StaticParams, slot: _Slot) -> None:
        self.static, self.slot = static, slot
        static.lent += 1

    def __del__(self) -> None:
        self.static.lent -= 1
        self.static.free.append(self.slot)


def _copy_of(params: Leaves, copies: list[_StaticParams], example: Example) -> _StaticParams:
    """Return the copy of these parameters, else one that is not lent, filled with them."""
    static = next((s for s in copies if s.holds(params)), None)
    if static is None:
        static = next((s for s in copies if not s.lent), None)
        if static is None:
            copies.append(static := _StaticParams(example.make()[0]))
        static.fill(params)
    return static


def _fill(static: Leaves | list[torch.Tensor], sources: Leaves | list[torch.Tensor]) -> None:
    if static:
        copy_each(static, sources)


def _fresh(results: Gradients) -> tuple[Any, ...]:
    """Copy results for the caller. None, the absence of a gradient, stays."""
    sources = [t for t in results if t is not None]
    copies = [torch.empty_like(t) for t in sources]
    _fill(copies, sources)
    taken = iter(copies)
    return tuple(None if t is None else next(taken) for t in results)
