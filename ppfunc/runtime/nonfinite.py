"""Find where a step first had a number that is not finite, by running it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ppfunc.schedule import linearize
from ppfunc.stage import FlatProgram, StageProgram
from ppfunc.stage.layout import local
from ppfunc.stage.signature import differentiable

from .arguments import StepArguments
from .buffers import Buffers, Leaves
from .calls import Origin
from .compile import CompiledStep, bind
from .errors import Failure, StepFailed, in_pass
from .execute import context_of, fill
from .gradients import LeafGradients
from .lowered import LoweredStage
from .ties import leaf_names
from .transport import Transport

_NOWHERE = 2**62


class NotFinite(FloatingPointError):
    """The loss or the gradients of a step are not finite: raised on all ranks, before anything is changed."""


def require_finite(made: Sequence[torch.Tensor], compiled: CompiledStep, passes: Sequence[StepArguments], transport: Transport) -> None:
    """Raise on all ranks where one of the losses and gradients of one is not finite; reads a number of the device."""
    device = next(iter(compiled.lowered.form.devices.values()))
    bad = [~torch.isfinite(local(t)).all() for t in made if differentiable(t.dtype)]
    count = torch.stack([torch.zeros((), device=device), *(one.to(device, torch.float32) for one in bad)]).sum()
    transport.collective("world").all_reduce(count)()
    if count > 0:
        cause = NotFinite("the loss or a gradient is not finite")
        raise located(compiled, passes, None, transport, cause, 0, len(passes)) from cause


def located(
    compiled: CompiledStep, passes: Sequence[StepArguments], before: Buffers | None, transport: Transport, cause: NotFinite,
    first: int, count: int,
) -> BaseException:  # fmt: skip
    """Run the passes of a step again, on all ranks; return the error to raise on this one.

    The rank that comes first in the schedule, of those with a number that is not finite, names the place; the others wait to hear of it.

    Args:
        before: the buffers of the pass before these, None for the first.
        first: the number of the first of these passes.
        count: of all passes of the step.
    """
    world = transport.collective("world")
    number, found = _first(compiled, passes, before, transport)
    device = next(iter(compiled.lowered.form.devices.values()))
    mine = number if number == _NOWHERE else number * world.size + world.index
    least = torch.tensor(-mine, dtype=torch.int64, device=device)
    world.all_reduce(least, "max")()
    transport.rest()
    if -int(least) == mine and mine != _NOWHERE:
        assert found is not None
        n, place, text = found
        error = FloatingPointError(f"{cause}; first not finite: {text}")
        failure = Failure(place.rank, place.position, place.instruction, error)
        return StepFailed(failure, partial(context_of, compiled.lowered), in_pass(first + n, count))
    if -int(least) == _NOWHERE and world.index == 0:
        what = "every microbatch is finite by itself; what is not is their sum, over microbatches or ranks, or its norm"
        return FloatingPointError(f"{cause}; {what}")
    transport.end({}, {})
    raise AssertionError("a step ended of which another rank was to say where it failed")


Found = tuple[int, Origin, str]  # the pass, the place, and what was not finite there


def _first(
    compiled: CompiledStep, passes: Sequence[StepArguments], before: Buffers | None, transport: Transport
) -> tuple[int, Found | None]:
    """The first place on this rank, and its number in the order of all ranks."""
    lowered = compiled.lowered._replace(spec=compiled.lowered.spec._replace(overlapped=None))
    notes: list[str] = []
    programs = {key: _watched(lowered.stages[key], program, notes.append) for key, program in compiled.programs.items()}
    bound = bind(lowered, programs, transport, tail=False)
    order = {place: n for n, place in enumerate(linearize(lowered.schedule))}
    found: Found | None = None
    number, buffers = _NOWHERE, before
    for n, part in enumerate(passes):
        buffers = fill(lowered, part, buffers)
        for call, place in zip(bound.calls, bound.places, strict=True):
            call(buffers)
            if place.instruction.microbatch in part.left_out:
                notes.clear()
            if notes and found is None:
                found, number = (n, place, notes[0]), n * (len(order) + 1) + order[place.rank, place.position]
    return number, found


def _watched(low: LoweredStage, program: StageProgram, note: Callable[[str], None]) -> StageProgram:
    """The same program, which notes what it makes that is not finite."""
    flat, passed = program.flat, sum(len(edge.leaves) for edge in low.sinks)
    names = [name for name, leaf in zip(leaf_names(low.params), low.params.leaves, strict=True) if leaf.grad]

    def forward(params: Leaves, x: Leaves, extras: Leaves) -> Any:
        outputs, saved = flat.forward(params, x, extras)
        parts = {"its output": outputs[:passed], "its loss": outputs[passed : passed + 1] if low.loss is not None else ()}
        for name, leaves in parts.items():
            if _bad(leaves):
                given = {"its input": x, "its parameters": params, "its targets, extras or state": extras}
                before = [other for other, own in given.items() if _bad(own)]
                note(f"{name}{f'; already {before[0]} had such numbers' if before else ''}")
        return outputs, saved

    def gradients(of_params: LeafGradients, of_x: LeafGradients) -> None:
        if _bad(of_x):
            note("the gradient of its input")
        for name, g in zip(names, of_params, strict=False):
            if _bad((g,)):
                note(f"the gradient of its parameter {name!r}")

    def backward(residuals: Any, gy: Leaves) -> Any:
        made = flat.backward(residuals, gy)
        gradients(*made)
        return made

    def backward_input(residuals: Any, gy: Leaves) -> Any:
        gx, rest = flat.backward_input(residuals, gy)
        gradients((), gx)
        return gx, rest

    def backward_weight(rest: Any) -> Any:
        made = flat.backward_weight(rest)
        gradients(made, ())
        return made

    return program._replace(flat=FlatProgram(forward, backward, backward_input, backward_weight))


def _bad(leaves: Sequence[torch.Tensor | None]) -> bool:
    return any(t is not None and differentiable(t.dtype) and not bool(t.isfinite().all()) for t in leaves)
