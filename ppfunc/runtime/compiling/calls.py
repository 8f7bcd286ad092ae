"""Make calls of stage programs, each a function of the buffers of a step, and the sums to which they add.

A forward pops its input from ``buffers.values`` and puts its output there; a backward pops gradients and puts
gradients. Residuals are kept by (stage, microbatch), used once and dropped.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple

import torch

from ppfunc.schedule import Op
from ppfunc.stage import FlatProgram, LeafSignature
from ppfunc.stage._torch import add_into_each, is_wrapped, transforming
from ppfunc.stage.device import generator_of
from ppfunc.stage.process import process_lock
from ppfunc.stage.signature import differentiable

from ..lowering.lowered import LoweredStage, slices
from ..ports.protocols import Call
from ..values.buffers import Buffers, Gradients, Key, LeafGradients, Leaves, Numbers, Origin, Owner, Tag

PlacedCall = tuple[Call, Origin]


class ProgramCall(NamedTuple):
    """Take apart a call of a program: ``put(buffers, run(*take(buffers)))`` is the whole of it.

    Args:
        run: the function of the program.
        take: gathers its arguments from the buffers.
        put: puts its result into the buffers.
    """

    run: Callable[..., Any]
    take: Callable[[Buffers], tuple[Any, ...]]
    put: Callable[[Buffers, Any], None]


def forward_call(low: LoweredStage, program: FlatProgram, key: Key, keep_residuals: bool) -> ProgramCall:
    """Take apart a forward: values in, values out, residuals, and the outputs that the caller wants."""
    (stage, microbatch), model_stage, wanted, states = key, low.model_stage, low.kept, len(low.state.leaves)
    sources = input_tags(low, key)
    sinks = [(Tag("F", stage, e.stage, microbatch), place) for e, place in slices(low.sinks) if e.leaves]
    sent = sum(len(e.leaves) for e in low.sinks)

    def take(buffers: Buffers) -> tuple[Leaves, Leaves, Leaves]:
        x = tuple([t for tag in sources for t in buffers.values.pop(tag)])
        return (
            buffers.params[model_stage],
            x,
            buffers.extras.get(key, ()) + buffers.state.get(model_stage, ()),
        )

    def put(buffers: Buffers, result: tuple[Leaves, tuple[Any, ...]]) -> None:
        outputs, saved = result
        for tag, place in sinks:
            buffers.values[tag] = outputs[place]
        if keep_residuals:
            buffers.residuals[key] = saved
        if wanted:
            buffers.kept[key] = tuple(map(_compact, outputs[sent : sent + wanted]))
        if states:
            buffers.state[model_stage] = outputs[sent + wanted :]

    return ProgramCall(program.forward, take, put)


def input_tags(low: LoweredStage, key: Key) -> list[Tag]:
    """List the messages that a forward takes; an edge without leaves carries none."""
    return [Tag("F", e.stage, *key) for e in low.sources if e.leaves]


def _compact(kept: torch.Tensor) -> torch.Tensor:
    """Copy a number that holds more memory than its own: some losses of the CPU hold that of all elements."""
    holds_more = kept.dim() == 0 and not is_wrapped(kept) and kept.untyped_storage().nbytes() > kept.nbytes
    return kept.clone() if holds_more else kept


def forward(low: LoweredStage, program: FlatProgram, key: Key, keep_residuals: bool) -> Call:
    """Make the call of a forward, which keeps the residuals where a backward follows."""
    run, take, put = forward_call(low, program, key, keep_residuals)
    function = fastest(run)
    return lambda buffers: put(buffers, function()(*take(buffers)))


def seeded(low: LoweredStage, microbatch: int, forward: Call) -> Call:
    """Set the generator before a forward: it draws by (seed, step, stage of the model, microbatch) alone.

    Without a seed, raise if the stage draws random numbers.
    """
    if low.outline.random is False:
        return forward
    generator, model_stage = generator_of(low.device), low.model_stage

    def run_seeded(buffers: Buffers) -> None:
        with process_lock:
            if buffers.seed is None:
                before = generator.get_state()
                forward(buffers)
                if not torch.equal(before, generator.get_state()):
                    raise ValueError(
                        f"stage {model_stage} drew random numbers; pass seed=(seed, step) to the step, two"
                        " integers"
                    )
                return
            text = repr((*buffers.seed, model_stage, buffers.microbatch_offset + microbatch)).encode()
            generator.manual_seed(
                int.from_bytes(blake2b(text, digest_size=8).digest(), "little", signed=True)
            )
            forward(buffers)

    return run_seeded


def backward_call(low: LoweredStage, program: FlatProgram, key: Key, whole: bool) -> ProgramCall:
    """Take apart a full backward, or an input gradient that leaves the rest to a weight gradient."""
    (stage, microbatch), cotangents, pass_on = key, _cotangents(low, key), _pass_on(low, key)
    known = _gradients_of(program.backward)

    def take(buffers: Buffers) -> tuple[tuple[Any, ...], Leaves]:
        return buffers.residuals.pop(key), cotangents(buffers)

    def put(buffers: Buffers, result: tuple[Any, Any]) -> None:
        first, second = result
        if whole:
            _add(buffers.gradients[stage], first, microbatch, *known)
        else:
            buffers.residuals[key] = second
        pass_on(buffers, second if whole else first)

    return ProgramCall(program.backward if whole else program.backward_input, take, put)


def backward(low: LoweredStage, program: FlatProgram, key: Key, whole: bool) -> Call:
    """Make the call of a backward. It hands over the only reference to the residuals, which it frees."""
    (stage, microbatch), cotangents, pass_on = key, _cotangents(low, key), _pass_on(low, key)
    add = _accumulating(program.backward) if whole else None
    if add is not None:
        return lambda buffers: pass_on(
            buffers,
            add()(
                buffers.residuals.pop(key), cotangents(buffers), _into(buffers.gradients[stage], microbatch)
            ),
        )
    run, _, put = backward_call(low, program, key, whole)
    function = fastest(run)
    return lambda buffers: put(buffers, function()(buffers.residuals.pop(key), cotangents(buffers)))


def unless_left_out(microbatch: int, run: Call, instead: Call) -> Call:
    """Call ``run``; ``instead`` where the microbatch has weight 0."""
    return lambda buffers: (instead if microbatch in buffers.left_out else run)(buffers)


def leave_out(low: LoweredStage, key: Key, op: Op) -> Call:
    """Make the call in place of B, I or W: zeros for the inputs, since 0 times NaN would be NaN."""
    cotangents, pass_on = _cotangents(low, key), _pass_on(low, key)
    zeros = (None,) * sum(len(edge.carrying) for edge in low.sources)

    def run_without(buffers: Buffers) -> None:
        if op is Op.I:
            buffers.residuals[key] = ()  # for W
        else:
            del buffers.residuals[key]
        if op is not Op.W:
            cotangents(buffers)
            pass_on(buffers, zeros)

    return run_without


def _cotangents(low: LoweredStage, key: Key) -> Callable[[Buffers], Leaves]:
    """Gather the gradients of the outputs: from the stages that took them, then the weight of the loss."""
    (stage, microbatch), weighted = key, low.loss is not None and low.loss.leaves[0].grad
    sinks = [Tag("B", e.stage, stage, microbatch) for e in low.sinks if e.carrying]

    def cotangents(buffers: Buffers) -> Leaves:
        gy = tuple([t for tag in sinks for t in buffers.values.pop(tag)])
        return gy + buffers.cotangents[key] if weighted else gy

    return cotangents


def _pass_on(low: LoweredStage, key: Key) -> Callable[[Buffers, LeafGradients], None]:
    """Put the gradients of the inputs under the tags that the sending stages read."""
    (stage, microbatch), device = key, low.device
    sources = [
        (Tag("B", stage, e.stage, microbatch), e.carrying, place)
        for e, place in slices(low.sources, carrying=True)
        if e.carrying
    ]

    def pass_on(buffers: Buffers, gradients: LeafGradients) -> None:
        for tag, leaves, place in sources:
            # Zeros where a gradient is structurally zero: the other end expects a tensor.
            buffers.values[tag] = tuple(
                [
                    torch.zeros(leaf.shape, dtype=leaf.dtype, device=device) if g is None else g
                    for g, leaf in zip(gradients[place], leaves, strict=True)
                ]
            )

    return pass_on


def weight(program: FlatProgram, key: Key) -> Call:
    """Make the call of a weight gradient."""
    run, (stage, microbatch) = program.backward_weight, key
    add = _accumulating(run)
    if add is not None:
        return lambda buffers: add()(buffers.residuals.pop(key), _into(buffers.gradients[stage], microbatch))
    function, known = fastest(run), _gradients_of(run)
    return lambda buffers: _add(
        buffers.gradients[stage], function()(buffers.residuals.pop(key)), microbatch, *known
    )


def _accumulating(program: Callable[..., Any]) -> Callable[[], Callable[..., Any]] | None:
    """Return the program that adds gradients up as it makes them; None where it makes all at once, or few."""
    accumulate = getattr(program, "accumulating", None)
    return None if accumulate is None else fastest(accumulate)


def _into(sums: Gradients, microbatch: int) -> tuple[object, ...]:
    return sums, microbatch, sums.totals()


def fastest(program: Any) -> Callable[[], Callable[..., Any]]:
    """Return a function that gets the fastest form of a program, written when first asked for.

    That form may drop its arguments: no caller keeps a reference to them.
    """
    return getattr(program, "fastest", lambda: program)


def _gradients_of(program: Any) -> tuple[Numbers | None, bool]:
    """List the leaves for which a program computes gradients, None if it is not traced, and whether nothing
    else lies in their memory.
    """
    return (_present(program.results[0]), program.fresh) if hasattr(program, "results") else (None, False)


def _present(gradients: Sequence[object]) -> Numbers:
    present = tuple([n for n, gradient in enumerate(gradients) if gradient is not None])
    return present if len(present) < len(gradients) else range(len(gradients))


def _add(
    sums: Gradients, gradients: LeafGradients, microbatch: int, numbers: Numbers | None, fresh: bool
) -> None:
    numbers = _present(gradients) if numbers is None else numbers
    present: Any = gradients if len(numbers) == len(gradients) else [g for g in gradients if g is not None]
    sums.add(present, numbers, microbatch, fresh)


class Sum:
    """Adds up gradients, in place once the sum is its own tensor.

    Equivalent to: ``total = g1 + g2 + g3 + ...``, from left to right, for each leaf.

    The first gradients are only borrowed, unless they are fresh: they may share memory with a message that is
    still on its way, with each other, or with a parameter. The second sum is then a new tensor, and later
    ones are added to it in place.

    Args:
        dtype: of the sum, where that of a gradient is narrower; that of the gradients where none is given.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._parts: dict[Numbers, _Part] = {}
        self._totals: tuple[torch.Tensor | None, ...] | None = None

    def totals(self) -> tuple[torch.Tensor | None, ...] | None:
        if self._totals is None and self._parts:
            own = {
                n: t
                for numbers, part in self._parts.items()
                for n, t in zip(numbers, part.total, strict=True)
                if part.is_own
            }
            self._totals = tuple(map(own.get, range(max(own, default=-1) + 1)))
        return self._totals

    def add(self, gradients: Leaves, numbers: Numbers, microbatch: int, fresh: bool = False) -> None:
        part = self._parts.get(numbers)
        if part is not None and not numbers:
            return
        if part is not None and part.is_own and not transforming():
            add_into_each(part.total, gradients)
            return
        self._totals = None
        if part is None:
            self._add_other(gradients, numbers, microbatch, fresh)
        else:  # leaf by leaf: each sum frees the gradient that it replaces, and vmap takes it
            total = list(part.total)
            self._parts[numbers] = _Part(total, part.is_own or not transforming())
            del part
            for n, gradient in enumerate(gradients):
                total[n] = total[n] + gradient

    def _add_other(self, gradients: Leaves, numbers: Numbers, microbatch: int, fresh: bool) -> None:
        """Add gradients of leaves that are divided otherwise than before, or new."""
        if {n for known in self._parts for n in known}.isdisjoint(numbers):
            self._parts[numbers] = _Part(
                [g.to(self._dtype_of(g.dtype)) for g in gradients] if self._dtype else gradients, fresh
            )
            return
        self._parts = {
            (n,): _Part([t], part.is_own)
            for known, part in self._parts.items()
            for n, t in zip(known, part.total, strict=True)
        }
        for n, gradient in zip(numbers, gradients, strict=True):
            self.add((gradient,), (n,), microbatch)

    def _dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, self._dtype) if self._dtype and differentiable(dtype) else dtype

    def put_back(self, gradients: Leaves) -> None:
        self.add(gradients, range(len(gradients)), -1)

    def signature(self, leaf: LeafSignature) -> LeafSignature:
        if self._dtype is None or (dtype := self._dtype_of(leaf.dtype)) is leaf.dtype:
            return leaf
        return replace(leaf, dtype=dtype)

    def take(self, like: Leaves, owned: Owner) -> Leaves:
        parts, self._parts, self._totals = self._parts, {}, None
        whole = parts.get(range(len(like)))
        if whole is not None and whole.is_own:
            return tuple(whole.total)
        sums = {
            n: t if part.is_own else owned(t)
            for known, part in parts.items()
            for n, t in zip(known, part.total, strict=True)
        }
        # Without a dtype a leaf's zeros take three quarters of the time.
        zeros = torch.zeros_like if self._dtype is None else self._zeros_like
        return tuple([sums[n] if n in sums else zeros(leaf) for n, leaf in enumerate(like)])

    def _zeros_like(self, leaf: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(leaf, dtype=self._dtype_of(leaf.dtype))


class _Part(NamedTuple):
    """Hold the sums of leaves whose gradients come together."""

    total: list[torch.Tensor] | Leaves
    is_own: bool  # whether they share memory with nothing else
