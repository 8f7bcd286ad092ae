"""The thunks of the instructions that compute: each a closure over the memory of its program."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any, NamedTuple

import torch

from ppfunc.stage import LeafSignature

from .calls import Home, Leaves, StageCall, places
from .generators import alone, generator_of
from .gradients import Given
from .memory import Memory
from .transport import Tag, Thunk


class Call(NamedTuple):
    """One call of a program, taken apart: ``put(run(*take()))`` is the whole of it.

    Args:
        run: the function of the program.
        take: gathers its arguments from the memory.
        put: puts its result into the memory.
    """

    run: Callable[..., Any]
    take: Callable[[], tuple[Any, ...]]
    put: Callable[[Any], None]

    def thunk(self) -> Thunk:
        """The call in one."""
        run, take, put = self
        return lambda: put(run(*take()))


# (forward, its arguments, backward, its arguments) -> (result of the forward, result of the backward)
Overlapped = Callable[[Callable[..., Any], tuple[Any, ...], Callable[..., Any], tuple[Any, ...]], tuple[Any, Any]]


def overlapped(first: Call, second: Call, together: Overlapped) -> Thunk:
    """The thunk of a forward and a backward that a function of the caller's runs as one."""

    def both() -> None:
        outputs, gradients = together(first.run, first.take(), second.run, second.take())
        first.put(outputs)
        second.put(gradients)

    return both


def forward_call(memory: Memory, call: StageCall, stage: int, microbatch: int, keep_residuals: bool) -> Call:
    """A forward: values in, values out, residuals and what the caller wants kept."""
    key = (stage, microbatch)
    params, constants, values = memory.params, memory.constants, memory.values
    residuals, kept, state = memory.residuals, memory.kept, memory.state
    # An edge without leaves carries no message.
    sources = [Tag("F", e.stage, stage, microbatch) for e in call.sources if e.leaves]
    sinks = [(Tag("F", stage, e.stage, microbatch), place) for e, place in places(call.sinks) if e.leaves]
    passed = sum(len(e.leaves) for e in call.sinks)
    states = call.state

    def take() -> tuple[Leaves, Leaves, Leaves]:
        x = tuple(t for tag in sources for t in values.pop(tag))
        return params[stage], x, constants.get(key, ()) + state.get(stage, ())

    def put(result: tuple[Leaves, tuple]) -> None:
        outputs, saved = result
        for tag, place in sinks:
            values[tag] = outputs[place]
        if keep_residuals:
            residuals[key] = saved
        kept[key] = outputs[passed : len(outputs) - states]
        if states:
            state[stage] = outputs[len(outputs) - states :]

    return Call(call.program.forward, take, put)


def forward(memory: Memory, call: StageCall, stage: int, microbatch: int, keep_residuals: bool) -> Thunk:
    """The thunk of a forward; in fewer steps for a stage that has one way in and one way out."""
    sources, sinks = ([e for e in edges if e.leaves] for edges in (call.sources, call.sinks))
    if len(sources) != 1 or len(sinks) != 1 or call.kept or call.state or not keep_residuals:
        return forward_call(memory, call, stage, microbatch, keep_residuals).thunk()
    run, key = call.program.forward, (stage, microbatch)
    params, constants, values, residuals, state = (
        memory.params,
        memory.constants,
        memory.values,
        memory.residuals,
        memory.state,
    )
    source, sink = Tag("F", sources[0].stage, stage, microbatch), Tag("F", stage, sinks[0].stage, microbatch)

    def forward_between() -> None:
        values[sink], residuals[key] = run(
            params[stage], values.pop(source), constants.get(key, ()) + state.get(stage, ())
        )

    return forward_between


def seeded(
    memory: Memory, device: torch.device, position: int, stage: int, microbatch: int, run: Thunk
) -> Thunk:
    """The forward, what it draws depending on nothing but (seed, step, stage, microbatch).

    The copies of a stage in a second chain count as the first. Without a seed a stage that may
    draw, for all that is known, must not.
    """
    generator = generator_of(device)

    def draw() -> None:
        with alone:
            if memory.seed is None:
                before = generator.get_state()
                run()
                if not torch.equal(before, generator.get_state()):
                    raise ValueError(f"stage {stage} drew random numbers; pass seed=(seed, step) to the step, two integers")
                return
            text = repr((*memory.seed, position, microbatch)).encode()
            generator.manual_seed(int.from_bytes(blake2b(text, digest_size=8).digest(), "little", signed=True))
            run()

    return draw


def backward_call(memory: Memory, call: StageCall, home: Home, stage: int, microbatch: int, whole: bool) -> Call:
    """A full backward, or an input gradient that leaves the rest to a weight gradient."""
    run = call.program.backward if whole else call.program.backward_input
    residuals, key = memory.residuals, (stage, microbatch)
    cotangents = _cotangents(memory, call, stage, microbatch)
    return Call(run, lambda: (residuals.pop(key), cotangents()), _gradients(memory, call, home, stage, microbatch, whole))


def backward(memory: Memory, call: StageCall, home: Home, stage: int, microbatch: int, whole: bool) -> Thunk:
    """The thunk of a backward; it hands over the only reference to the residuals, which are freed on the way."""
    run = call.program.backward if whole else call.program.backward_input
    residuals, key = memory.residuals, (stage, microbatch)
    cotangents = _cotangents(memory, call, stage, microbatch)
    put = _gradients(memory, call, home, stage, microbatch, whole)

    def backward_step() -> None:
        put(run(residuals.pop(key), cotangents()))

    return backward_step


def _cotangents(memory: Memory, call: StageCall, stage: int, microbatch: int) -> Callable[[], Leaves]:
    """Gathers the gradients of the outputs: from the stages that took them, then the weight of the loss."""
    values, weights, key = memory.values, memory.weights, (stage, microbatch)
    sinks = [Tag("B", e.stage, stage, microbatch) for e in call.sinks if e.carrying]
    if call.weighted:
        return lambda: tuple(t for tag in sinks for t in values.pop(tag)) + weights[key]
    if len(sinks) == 1:
        (sink,) = sinks
        return lambda: values.pop(sink)
    return lambda: tuple(t for tag in sinks for t in values.pop(tag))


def _gradients(
    memory: Memory, call: StageCall, home: Home, stage: int, microbatch: int, whole: bool
) -> Callable[[tuple[Any, Any]], None]:
    """Puts the result of a backward where it belongs."""
    values, residuals, key = memory.values, memory.residuals, (stage, microbatch)
    add, device = memory.gradients[stage].add, home.device
    sources = [
        (Tag("B", stage, e.stage, microbatch), e.carrying, place)
        for e, place in places(call.sources, carrying=True)
        if e.carrying
    ]

    def put(result: tuple[Any, Any]) -> None:
        first, second = result
        if whole:
            add(first, microbatch)
            gradients = second
        else:
            gradients, residuals[key] = first, second
        for tag, leaves, place in sources:
            values[tag] = _dense(gradients[place], leaves, device)

    return put


def weight(memory: Memory, call: StageCall, stage: int, microbatch: int) -> Thunk:
    """The thunk of a weight gradient."""
    run, key = call.program.backward_weight, (stage, microbatch)
    residuals, add = memory.residuals, memory.gradients[stage].add

    def weight_step() -> None:
        add(run(residuals.pop(key)), microbatch)

    return weight_step


def _dense(gradients: Given, leaves: tuple[LeafSignature, ...], device: torch.device) -> Leaves:
    """Zeros where a gradient is structurally zero: the other end expects a tensor."""
    for gradient in gradients:
        if gradient is None:
            return tuple(
                torch.zeros(leaf.shape, dtype=leaf.dtype, device=device) if g is None else g
                for g, leaf in zip(gradients, leaves, strict=True)
            )
    return gradients


def move_residuals(memory: Memory, home: Home, stage: int, microbatch: int, target: torch.device) -> Thunk | None:
    """The thunk that moves residuals to ``target``; parameters, held by reference, stay where they are."""
    if home.device.type == "cpu":
        return None
    residuals, params, key = memory.residuals, memory.params, (stage, microbatch)

    def move() -> None:
        if not all(isinstance(t, torch.Tensor) for t in residuals[key]):
            raise TypeError(
                f"the residuals of stage {stage} cannot be moved: its engine keeps something else than tensors; "
                f"use the graph engine without cuda_graphs=True, or a schedule without OFFLOAD"
            )
        stay = {t.untyped_storage().data_ptr() for t in params[stage]}
        residuals[key] = tuple(
            t if t.untyped_storage().data_ptr() in stay else t.to(target, non_blocking=True) for t in residuals[key]
        )

    return move


def publish(memory: Memory, home: Home, stage: int, group: tuple[int, ...]) -> Thunk:
    """The thunk that shows a stage's gradients to its copies and to itself."""

    def publish() -> None:
        total = memory.gradients[stage].take(home.differentiated(memory.params[stage]), set())
        for copy in group:
            memory.values[Tag("R", stage, copy, -1)] = total

    return publish


def collect(memory: Memory, stage: int, group: tuple[int, ...]) -> Thunk:
    """The thunk that adds up what the copies of a stage have shown, in the order of the stages."""

    def collect() -> None:
        for copy in group:
            memory.gradients[stage].merge(memory.values.pop(Tag("R", copy, stage, -1)))

    return collect
