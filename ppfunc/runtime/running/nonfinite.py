"""Find where a step first had a number that is not finite, by running it again."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ppfunc.schedule.passes.running import linearize
from ppfunc.stage import FlatProgram, StageProgram
from ppfunc.stage.layout import local
from ppfunc.stage.signature import differentiable, leaf_names

from ..compiling.compile import CompiledStep, bind
from ..lowering.lowered import LoweredStage
from ..ports.protocols import Transport
from ..values.buffers import Buffers, Compared, LeafGradients, Leaves, Origin
from ..values.errors import Failure, StepFailed

_NOWHERE = 2**62


class NotFinite(FloatingPointError):
    """Raised on all ranks, before anything is changed, where the loss or a gradient is not finite."""


def count_nonfinite(
    tensors: Sequence[torch.Tensor], compiled: CompiledStep, transport: Transport
) -> Compared:
    """Count the losses and gradients of all ranks that are not finite, for the end of the step to raise."""
    device = next(iter(compiled.lowered.form.devices.values()))
    bad = [~torch.isfinite(local(t)).all() for t in tensors if differentiable(t.dtype)]
    count = torch.stack(
        [torch.zeros((), device=device), *(one.to(device, torch.float32) for one in bad)]
    ).sum()
    transport.collective("world").all_reduce(count)()
    return Compared(count, _require_none)


def _require_none(count: torch.Tensor) -> None:
    if count > 0:
        raise NotFinite("the loss or a gradient is not finite")


def locate_nonfinite(
    compiled: CompiledStep,
    buffers: Buffers,
    transport: Transport,
    cause: NotFinite,
    which: str = "",
) -> BaseException:
    """Run a step again, on all ranks; return the error to raise on this one.

    The rank that comes first in the schedule, of those with a number that is not finite, names the place; the
    others wait for its error.

    Args:
        buffers: of the step, as they were before it ran.
        which: of several steps of a call, as in :class:`~ppfunc.runtime.values.errors.StepFailed`.
    """
    world = transport.collective("world")
    first = _first(compiled, buffers, transport)
    mine = _NOWHERE if first is None else first[0] * world.size + world.index
    device = next(iter(compiled.lowered.form.devices.values()))
    least = torch.tensor(-mine, dtype=torch.int64, device=device)
    world.all_reduce(least, "max")()
    transport.rest()
    if first is not None and -int(least) == mine:
        _, place, text = first
        error = FloatingPointError(f"{cause}; first not finite: {text}")
        failure = Failure(place.rank, place.position, place.instruction, error)
        return StepFailed(failure, compiled.lowered.context_of, which)
    if -int(least) == _NOWHERE and world.index == 0:
        what = (
            "every microbatch is finite by itself; what is not is their sum, over microbatches or ranks, or"
            " its norm"
        )
        return FloatingPointError(f"{cause}; {what}")
    transport.end({}, {})
    raise AssertionError("a step ended of which another rank was to say where it failed")


def _first(compiled: CompiledStep, buffers: Buffers, transport: Transport) -> tuple[int, Origin, str] | None:
    """Find the first place on this rank: its number in the order of all ranks, and what is bad there."""
    lowered = compiled.lowered._replace(spec=compiled.lowered.spec._replace(overlapped=None))
    notes: list[str] = []
    programs = {
        key: _watched(lowered.stages[key], program, notes.append)
        for key, program in compiled.programs.items()
    }
    bound = bind(lowered, programs, transport, tail=False)
    order = {place: n for n, place in enumerate(linearize(lowered.schedule))}
    first: tuple[int, Origin, str] | None = None
    for call, place in zip(bound.calls, bound.places, strict=True):
        call(buffers)
        if place.instruction.microbatch in buffers.left_out:
            notes.clear()
        if notes and first is None:
            first = order[place.rank, place.position], place, notes[0]
    return first


def _watched(low: LoweredStage, program: StageProgram, note: Callable[[str], None]) -> StageProgram:
    """Watch a program: note what it makes that is not finite."""
    flat, passed = program.flat, sum(len(edge.leaves) for edge in low.sinks)
    names = [name for name, leaf in zip(leaf_names(low.params), low.params.leaves, strict=True) if leaf.grad]

    def forward(params: Leaves, x: Leaves, extras: Leaves) -> Any:
        outputs, saved = flat.forward(params, x, extras)
        losses = outputs[passed : passed + 1] if low.loss is not None else ()
        for what, leaves in {"its output": outputs[:passed], "its loss": losses}.items():
            if _bad(leaves):
                received = {"its input": x, "its parameters": params, "its targets, extras or state": extras}
                before = [name for name, own in received.items() if _bad(own)]
                note(f"{what}{f'; already {before[0]} had such numbers' if before else ''}")
        return outputs, saved

    def watched(
        run: Callable[..., Any], gradients: Callable[[Any], tuple[LeafGradients, LeafGradients]]
    ) -> Any:
        def call(*args: Any) -> Any:
            result = run(*args)
            of_params, of_x = gradients(result)
            if _bad(of_x):
                note("the gradient of its input")
            for name, g in zip(names, of_params, strict=False):
                if _bad((g,)):
                    note(f"the gradient of its parameter {name!r}")
            return result

        return call

    return program._replace(
        flat=FlatProgram(
            forward,
            watched(flat.backward, lambda result: result),
            watched(flat.backward_input, lambda result: ((), result[0])),
            watched(flat.backward_weight, lambda result: (result, ())),
        )
    )


def _bad(leaves: Sequence[torch.Tensor | None]) -> bool:
    return any(t is not None and differentiable(t.dtype) and not bool(t.isfinite().all()) for t in leaves)
