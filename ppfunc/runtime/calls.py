"""Make calls of stage programs: forward, backward, input and weight gradient, each a function of the buffers of a step.

A forward pops its input from ``buffers.values`` and puts its output there; a backward pops gradients and puts
gradients. Residuals are kept by (stage, microbatch), used once and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any, NamedTuple

import torch

from ppfunc.schedule import Instruction
from ppfunc.stage import FlatProgram, LeafSignature
from ppfunc.stage.process import process_lock

from .buffers import Buffers, Key, Leaves, Tag
from .gradients import Absent, LeafGradients
from .lowered import BATCH, Edge, LoweredStage
from .rng import generator_of
from .transport import Call


class Place(NamedTuple):
    """Where in the schedule a call comes from; ``awaited`` is the message that it waits for, if it does nothing else."""

    rank: int
    position: int
    instruction: Instruction
    awaited: Tag | None = None


class ProgramCall(NamedTuple):
    """One call of a program, taken apart: ``put(buffers, run(*take(buffers)))`` is the whole of it.

    Args:
        run: the function of the program.
        take: gathers its arguments from the buffers.
        put: puts its result into the buffers.
    """

    run: Callable[..., Any]
    take: Callable[[Buffers], tuple[Any, ...]]
    put: Callable[[Buffers, Any], None]


def forward_call(low: LoweredStage, program: FlatProgram, key: Key, keep_residuals: bool) -> ProgramCall:
    """A forward: values in, values out, residuals, and the outputs that the caller wants."""
    (stage, microbatch), model, kept, states = key, low.model, low.kept, len(low.state.leaves)
    # An edge without leaves carries no message.
    sources = [Tag("F", e.stage, stage, microbatch) for e in low.sources if e.leaves]
    sinks = [(Tag("F", stage, e.stage, microbatch), place) for e, place in _places(low.sinks) if e.leaves]
    passed = sum(len(e.leaves) for e in low.sinks)

    def take(buffers: Buffers) -> tuple[Leaves, Leaves, Leaves]:
        x = tuple([t for tag in sources for t in buffers.values.pop(tag)])
        return buffers.params[model], x, buffers.extras.get(key, ()) + buffers.state.get(model, ())

    def put(buffers: Buffers, result: tuple[Leaves, tuple[Any, ...]]) -> None:
        outputs, saved = result
        for tag, place in sinks:
            buffers.values[tag] = outputs[place]
        if keep_residuals:
            buffers.residuals[key] = saved
        if kept:
            buffers.kept[key] = outputs[passed : passed + kept]
        if states:
            buffers.state[model] = outputs[passed + kept :]

    return ProgramCall(program.forward, take, put)


def forward(low: LoweredStage, program: FlatProgram, key: Key, keep_residuals: bool) -> Call:
    """The call of a forward."""
    run, take, put = forward_call(low, program, key, keep_residuals)
    return lambda buffers: put(buffers, run(*take(buffers)))


def seeded(low: LoweredStage, microbatch: int, forward: Call) -> Call:
    """The forward with its generator set, so that it draws by (seed, step, stage of the model, microbatch) alone.

    Without a seed, raise if the stage draws random numbers.
    """
    if low.outline.random is False:
        return forward
    generator, model = generator_of(low.device), low.model

    def run_seeded(buffers: Buffers) -> None:
        with process_lock:
            if buffers.seed is None:
                before = generator.get_state()
                forward(buffers)
                if not torch.equal(before, generator.get_state()):
                    raise ValueError(f"stage {model} drew random numbers; pass seed=(seed, step) to the step, two integers")
                return
            text = repr((*buffers.seed, model, buffers.first + microbatch)).encode()
            generator.manual_seed(int.from_bytes(blake2b(text, digest_size=8).digest(), "little", signed=True))
            forward(buffers)

    return run_seeded


def load(low: LoweredStage, key: Key) -> Call | None:
    """Bring inputs and targets of a microbatch to the stage's device."""
    device, tag = low.device, Tag("F", BATCH, *key)
    if device.type == "cpu":
        return None

    def run_load(buffers: Buffers) -> None:
        if tag in buffers.values:
            buffers.values[tag] = tuple(t.to(device, non_blocking=True) for t in buffers.values[tag])
        if key in buffers.extras:
            buffers.extras[key] = tuple(t.to(device, non_blocking=True) for t in buffers.extras[key])

    return run_load


def backward_call(low: LoweredStage, program: FlatProgram, key: Key, whole: bool) -> ProgramCall:
    """A full backward, or an input gradient that leaves the rest to a weight gradient."""
    (stage, microbatch), device, cotangents = key, low.device, _cotangents(low, key)
    edges = list(_places(low.sources, carrying=True))
    sources = [(Tag("B", stage, e.stage, microbatch), e.carrying, place) for e, place in edges if e.carrying]
    absent = _absent(program.backward)

    def take(buffers: Buffers) -> tuple[tuple[Any, ...], Leaves]:
        return buffers.residuals.pop(key), cotangents(buffers)

    def put(buffers: Buffers, result: tuple[Any, Any]) -> None:
        gradients, rest = result
        if whole:
            buffers.gradients[stage].add(gradients, microbatch, absent)
            gradients = rest
        else:
            buffers.residuals[key] = rest
        for tag, leaves, place in sources:
            buffers.values[tag] = _dense(gradients[place], leaves, device)

    return ProgramCall(program.backward if whole else program.backward_input, take, put)


def backward(low: LoweredStage, program: FlatProgram, key: Key, whole: bool) -> Call:
    """The call of a backward. It hands over the only reference to the residuals, which are freed on the way."""
    cotangents = _cotangents(low, key)
    run, _, put = backward_call(low, program, key, whole)
    return lambda buffers: put(buffers, run(buffers.residuals.pop(key), cotangents(buffers)))


def _cotangents(low: LoweredStage, key: Key) -> Callable[[Buffers], Leaves]:
    """Gathers the gradients of the outputs: from the stages that took them, then the weight of the loss."""
    (stage, microbatch), weighted = key, low.loss is not None and low.loss.leaves[0].grad
    sinks = [Tag("B", e.stage, stage, microbatch) for e in low.sinks if e.carrying]

    def cotangents(buffers: Buffers) -> Leaves:
        gy = tuple([t for tag in sinks for t in buffers.values.pop(tag)])
        return gy + buffers.cotangents[key] if weighted else gy

    return cotangents


def weight(program: FlatProgram, key: Key) -> Call:
    """The call of a weight gradient."""
    run, (stage, microbatch) = program.backward_weight, key
    absent = _absent(run)
    return lambda buffers: buffers.gradients[stage].add(run(buffers.residuals.pop(key)), microbatch, absent)


def _absent(program: Callable[..., Any]) -> Absent | None:
    """Which parameter gradients a traced program never has; None where only its results tell."""
    recipe = getattr(program, "recipe", None)
    return None if recipe is None else tuple(gradient is None for gradient in recipe.part.results[0])


def _dense(gradients: LeafGradients, leaves: tuple[LeafSignature, ...], device: torch.device) -> Leaves:
    """Zeros where a gradient is structurally zero: the other end expects a tensor."""
    pairs = zip(gradients, leaves, strict=True)
    return tuple([torch.zeros(leaf.shape, dtype=leaf.dtype, device=device) if g is None else g for g, leaf in pairs])


class Held(NamedTuple):
    """A view of a parameter among residuals, by the number of the parameter: the tensor itself may be freed meanwhile."""

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def release_params(low: LoweredStage, key: Key) -> Call:
    """Let go of the parameters among the residuals, so that RESHARD can free them.

    Raises:
        TypeError: the engine keeps something else than tensors.
    """
    model = low.model

    def release(buffers: Buffers) -> None:
        numbers = {t.untyped_storage().data_ptr(): n for n, t in enumerate(buffers.params[model]) if t.numel()}
        saved = buffers.residuals[key]
        if not all(isinstance(t, torch.Tensor) for t in saved):
            raise TypeError(
                f"the parameters of stage {model} cannot be freed between forward and backward: its engine keeps something else than "
                f"tensors; use the graph engine without cuda_graphs=True, or whole parameters"
            )
        places = [numbers.get(t.untyped_storage().data_ptr()) if t.numel() else None for t in saved]
        buffers.residuals[key] = tuple(
            [t if n is None else Held(n, t.shape, t.stride(), t.storage_offset()) for t, n in zip(saved, places, strict=True)]
        )

    return release


def restore_params(low: LoweredStage, key: Key) -> Call:
    """Put the parameters back where :func:`release_params` has let go of them."""
    model = low.model

    def restore(buffers: Buffers) -> None:
        params, saved = buffers.params[model], buffers.residuals[key]
        buffers.residuals[key] = tuple(
            [params[t.number].as_strided(t.shape, t.stride, t.offset) if isinstance(t, Held) else t for t in saved]
        )

    return restore


def move_residuals(low: LoweredStage, key: Key, target: torch.device) -> Call | None:
    """Move residuals to ``target``; parameters, held by reference, stay where they are."""
    if low.device.type == "cpu":
        return None
    model = low.model

    def move(buffers: Buffers) -> None:
        if not all(isinstance(t, torch.Tensor) for t in buffers.residuals[key]):
            raise TypeError(
                f"the residuals of stage {model} cannot be moved: its engine keeps something else than tensors; "
                f"use the graph engine without cuda_graphs=True, or a schedule without OFFLOAD"
            )
        stay = {t.untyped_storage().data_ptr() for t in buffers.params[model]}
        buffers.residuals[key] = tuple(
            t if t.untyped_storage().data_ptr() in stay else t.to(target, non_blocking=True) for t in buffers.residuals[key]
        )

    return move


def _places(edges: tuple[Edge, ...], carrying: bool = False) -> Iterator[tuple[Edge, slice]]:
    """Each edge with the place of its leaves in the tuple of all of them."""
    start = 0
    for edge in edges:
        stop = start + len(edge.carrying if carrying else edge.leaves)
        yield edge, slice(start, stop)
        start = stop
