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

from .buffers import Buffers, Key, Leaves, Tag
from .gradients import Absent, LeafGradients
from .lower import BATCH
from .rng import generator_of, process_lock
from .transport import Call


class Place(NamedTuple):
    """Where in the schedule a call comes from."""

    rank: int
    position: int
    instruction: Instruction


class Edge(NamedTuple):
    """Where one part of a stage's input comes from, or where one part of its output goes.

    Args:
        stage: the stage at the other end, -1 for the batch.
        leaves: the signature of what travels.
    """

    stage: int
    leaves: tuple[LeafSignature, ...]

    @property
    def carrying(self) -> tuple[LeafSignature, ...]:
        """The leaves whose gradients travel back."""
        return tuple(leaf for leaf in self.leaves if leaf.grad)


class CompiledStage(NamedTuple):
    """One stage for one form of its arguments, as the program calls it.

    Args:
        program: functions over flat tuples of leaves.
        model: number of the stage in the model.
        device: where it computes.
        params: signature of its parameters; the leaves with ``grad`` get gradients.
        sources: the edges that make up its input, in the order of the leaves.
        sinks: the edges that make up the first leaves of its output; what follows is kept for the caller.
        weighted: whether its output has a loss, whose cotangent is the weight of the microbatch.
        kept: number of leaves that follow those of the sinks.
        state: number of leaves of the state: the last of its extras, and the last of its output.
        random: whether its forward draws random numbers; None where that is not known.
    """

    program: FlatProgram
    model: int
    device: torch.device
    params: tuple[LeafSignature, ...]
    sources: tuple[Edge, ...]
    sinks: tuple[Edge, ...]
    weighted: bool
    kept: int
    state: int
    random: bool | None


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

    def whole(self) -> Call:
        """The call in one."""
        run, take, put = self
        return lambda buffers: put(buffers, run(*take(buffers)))


def forward_call(compiled: CompiledStage, key: Key, keep_residuals: bool) -> ProgramCall:
    """A forward: values in, values out, residuals, and the outputs that the caller wants."""
    (stage, microbatch), model, states = key, compiled.model, compiled.state
    # An edge without leaves carries no message.
    sources = [Tag("F", e.stage, stage, microbatch) for e in compiled.sources if e.leaves]
    sinks = [(Tag("F", stage, e.stage, microbatch), place) for e, place in _places(compiled.sinks) if e.leaves]
    passed = sum(len(e.leaves) for e in compiled.sinks)

    def take(buffers: Buffers) -> tuple[Leaves, Leaves, Leaves]:
        x = tuple(t for tag in sources for t in buffers.values.pop(tag))
        return buffers.params[model], x, buffers.extras.get(key, ()) + buffers.state.get(model, ())

    def put(buffers: Buffers, result: tuple[Leaves, tuple[Any, ...]]) -> None:
        outputs, saved = result
        for tag, place in sinks:
            buffers.values[tag] = outputs[place]
        if keep_residuals:
            buffers.residuals[key] = saved
        if compiled.kept:
            buffers.kept[key] = outputs[passed : len(outputs) - states]
        if states:
            buffers.state[model] = outputs[len(outputs) - states :]

    return ProgramCall(compiled.program.forward, take, put)


def forward(compiled: CompiledStage, key: Key, keep_residuals: bool) -> Call:
    """The call of a forward; in fewer steps for a stage that has one way in and one way out."""
    sources, sinks = ([e for e in edges if e.leaves] for edges in (compiled.sources, compiled.sinks))
    if len(sources) != 1 or len(sinks) != 1 or compiled.kept or compiled.state or not keep_residuals:
        return forward_call(compiled, key, keep_residuals).whole()
    run, (stage, microbatch), model = compiled.program.forward, key, compiled.model
    source, sink = Tag("F", sources[0].stage, stage, microbatch), Tag("F", stage, sinks[0].stage, microbatch)

    def run_forward(buffers: Buffers) -> None:
        values = buffers.values
        values[sink], buffers.residuals[key] = run(
            buffers.params[model], values.pop(source), buffers.extras.get(key, ()) + buffers.state.get(model, ())
        )

    return run_forward


def seeded(compiled: CompiledStage, microbatch: int, forward: Call) -> Call:
    """The forward with its generator set, so that it draws by (seed, step, stage of the model, microbatch) alone.

    Without a seed, raise if the stage draws random numbers.
    """
    if compiled.random is False:
        return forward
    generator, model = generator_of(compiled.device), compiled.model

    def run_seeded(buffers: Buffers) -> None:
        with process_lock:
            if buffers.seed is None:
                before = generator.get_state()
                forward(buffers)
                if not torch.equal(before, generator.get_state()):
                    raise ValueError(f"stage {model} drew random numbers; pass seed=(seed, step) to the step, two integers")
                return
            text = repr((*buffers.seed, model, microbatch)).encode()
            generator.manual_seed(int.from_bytes(blake2b(text, digest_size=8).digest(), "little", signed=True))
            forward(buffers)

    return run_seeded


def load(compiled: CompiledStage, key: Key) -> Call | None:
    """Bring inputs and targets of a microbatch to the stage's device."""
    device, tag = compiled.device, Tag("F", BATCH, *key)
    if device.type == "cpu":
        return None

    def run_load(buffers: Buffers) -> None:
        if tag in buffers.values:
            buffers.values[tag] = tuple(t.to(device, non_blocking=True) for t in buffers.values[tag])
        if key in buffers.extras:
            buffers.extras[key] = tuple(t.to(device, non_blocking=True) for t in buffers.extras[key])

    return run_load


def backward_call(compiled: CompiledStage, key: Key, whole: bool) -> ProgramCall:
    """A full backward, or an input gradient that leaves the rest to a weight gradient."""
    (stage, microbatch), device, cotangents = key, compiled.device, _cotangents(compiled, key)
    edges = list(_places(compiled.sources, carrying=True))
    sources = [(Tag("B", stage, e.stage, microbatch), e.carrying, place) for e, place in edges if e.carrying]
    absent = _absent(compiled.program.backward)

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

    return ProgramCall(compiled.program.backward if whole else compiled.program.backward_input, take, put)


def backward(compiled: CompiledStage, key: Key, whole: bool) -> Call:
    """The call of a backward. It hands over the only reference to the residuals, which are freed on the way."""
    cotangents = _cotangents(compiled, key)
    run, _, put = backward_call(compiled, key, whole)
    return lambda buffers: put(buffers, run(buffers.residuals.pop(key), cotangents(buffers)))


def _cotangents(compiled: CompiledStage, key: Key) -> Callable[[Buffers], Leaves]:
    """Gathers the gradients of the outputs: from the stages that took them, then the weight of the loss."""
    (stage, microbatch), weighted = key, compiled.weighted
    sinks = [Tag("B", e.stage, stage, microbatch) for e in compiled.sinks if e.carrying]

    def cotangents(buffers: Buffers) -> Leaves:
        gy = tuple(t for tag in sinks for t in buffers.values.pop(tag))
        return gy + buffers.cotangents[key] if weighted else gy

    return cotangents


def weight(compiled: CompiledStage, key: Key) -> Call:
    """The call of a weight gradient."""
    run, (stage, microbatch) = compiled.program.backward_weight, key
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


def move_residuals(compiled: CompiledStage, key: Key, target: torch.device) -> Call | None:
    """Move residuals to ``target``; parameters, held by reference, stay where they are."""
    if compiled.device.type == "cpu":
        return None
    model = compiled.model

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
