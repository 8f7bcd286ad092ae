"""Run the forward and the backward of an ``OVERLAP_F_B`` as one: interleaved in one program, or on two
streams.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ppfunc.stage.device import SideStreams, accelerates, available, current_stream
from ppfunc.stage.tree import tree_leaves

Program = Callable[..., Any]

Overlapped = Callable[[Program, tuple[Any, ...], Program, tuple[Any, ...]], tuple[Any, Any]]
"""``(forward, its arguments, backward, its arguments) -> (result of one, result of the other)``."""


def interleaved() -> Overlapped:
    """Run the forward and the backward of a pair as one traced program, their operators in turn.

    Pass it as ``overlapped=`` to :func:`~ppfunc.value_and_grad`, with the graph engine. The kernels of one
    run while a collective of the other is on its way. Compiled programs become one that inductor schedules
    as a whole. The bits are those of running both in turn if kernels are deterministic.

    Raises (when a pair runs):
        TypeError: the stages have another engine.
    """
    merged: WeakKeyDictionary[Program, WeakKeyDictionary[Program, Program]] = WeakKeyDictionary()

    def overlapped(
        forward: Program, arguments: tuple[Any, ...], backward: Program, others: tuple[Any, ...]
    ) -> tuple[Any, Any]:
        known = merged.setdefault(forward, WeakKeyDictionary())
        if backward not in known:
            from ppfunc.stage.engines.tracing.emit import TracedFunction
            from ppfunc.stage.engines.tracing.interleave import interleave

            known[backward] = TracedFunction(interleave(_recipe(forward), _recipe(backward)))
        outputs, residuals, first, second = known[backward](*arguments, *others)
        return (outputs, residuals), (first, second)

    return overlapped


def _recipe(program: Program) -> Any:
    if not hasattr(program, "recipe"):
        raise TypeError(
            "interleaved() got a stage that is not traced: use the graph engine, or leave out overlapped="
        )
    return program.recipe


def two_streams() -> Overlapped:
    """Run the backward of a pair on a stream of its own beside the forward.

    Pass it as ``overlapped=`` to :func:`~ppfunc.value_and_grad`, with the graph engine. Under the functional
    and the eager engine nothing overlaps: autograd runs a backward on the stream of its forward. Both begin
    after the work issued before, and later work waits for both. The bits are those of running both in turn
    if kernels are deterministic, whatever their stream: set ``CUBLAS_WORKSPACE_CONFIG`` for those of cuBLAS.

    Raises:
        ValueError: there is no accelerator; or, when a pair runs, the stages do not compute on one.
    """
    if not available():
        raise ValueError(
            "two_streams() is for an accelerator, such as CUDA, and there is none here; leave out"
            " overlapped=, or take interleaved()"
        )
    streams = SideStreams()

    def overlapped(
        forward: Program, arguments: tuple[Any, ...], backward: Program, others: tuple[Any, ...]
    ) -> tuple[Any, Any]:
        tensors = [t for t in tree_leaves((arguments, others)) if isinstance(t, torch.Tensor)]
        device = next((t.device for t in tensors), torch.device("cpu"))
        if not accelerates(device):
            raise ValueError(
                f"two_streams() got stages that compute on {device}; leave out overlapped= without an"
                " accelerator"
            )
        here, beside = current_stream(device), streams[device]
        beside.wait_stream(here)
        for tensor in tree_leaves(others):
            _used_on(beside, tensor)
        with beside:
            gradients = backward(*others)
        outputs = forward(*arguments)
        here.wait_stream(beside)
        for tensor in tree_leaves(gradients):
            _used_on(here, tensor)
        return outputs, gradients

    return overlapped


def _used_on(stream: torch.Stream, leaf: Any) -> None:
    """Keep the memory of a tensor from being used anew before ``stream`` is done with it."""
    if isinstance(leaf, torch.Tensor) and accelerates(leaf.device):
        leaf.record_stream(stream)
