"""Make the calls of a program, each a function of the buffers of a step, and the sums to which they add.

A forward pops its input from ``buffers.values`` and puts its output there; a backward pops gradients and puts
gradients. Residuals are kept by (stage, microbatch), used once and dropped.

Gradients of a shared parameter are added up in the order of the stages, so that any number of processes gets
the same bits. Processes that hold its places exchange gradients by one all-to-all, and checksums of the
values, which are read at the end of the step. Steps that update parameters compare the values when the ranks
meet.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from ppfunc._checks import naming_arguments
from ppfunc.schedule import Instruction, Op
from ppfunc.stage import FlatProgram, LeafSignature
from ppfunc.stage._torch import add_into_each, address, is_wrapped, transforming
from ppfunc.stage.device import (
    SideStreams,
    accelerates,
    available,
    current_stream,
    download,
    generator_of,
    record_event,
    upload,
)
from ppfunc.stage.process import process_lock
from ppfunc.stage.signature import differentiable
from ppfunc.stage.tree import tree_leaves

from ..lowering.comparison import checksum, differing
from ..lowering.lower import (
    NOWHERE,
    LoweredStage,
    LoweredStep,
    MessagePart,
    Overlapped,
    Program,
    places_of,
)
from ..lowering.ties import OTHER_VALUES, Place, SharedLeaf, differs
from ..ports.protocols import Call, Collective, Transport, apart
from ..values.buffers import (
    Buffers,
    Compared,
    Gradients,
    Key,
    LeafGradients,
    Leaves,
    Numbers,
    Origin,
    Owner,
    ParameterUpdate,
    Tag,
)
from ..values.errors import AgreementError

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
    sinks = [
        (Tag("F", stage, e.stage, microbatch), place)
        for e, place in places_of(low.sinks)
        if e.leaves and e.stage != NOWHERE
    ]
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
    """List the messages that a forward takes; an edge without leaves has no message."""
    stage, microbatch = key
    return [Tag("F", e.stage, stage, microbatch - e.shift) for e in low.sources if e.leaves]


def pack(parts: Sequence[MessagePart], buffers: Buffers) -> None:
    """Join the parts of a message under the tag of the first."""
    values = [[buffers.values.pop(tag) for tag in part.tags] for part in parts if part.leaves]
    buffers.values[parts[0].tags[0]] = tuple([t for of_part, *_ in values for t in of_part])


def unpack(parts: Sequence[MessagePart], buffers: Buffers) -> None:
    """Take a message apart into its parts."""
    rest = iter(buffers.values.pop(parts[0].tags[0]))
    for part in parts:
        if part.leaves:
            buffers.values.update(dict.fromkeys(part.tags, tuple(islice(rest, len(part.leaves)))))


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
        (Tag("B", stage, e.stage, microbatch - e.shift), e.carrying, place)
        for e, place in places_of(low.sources, carrying=True)
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
    """Return the program that adds gradients up as it makes them. Return None if it makes all at once."""
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
    """List the leaves for which a traced program computes gradients, and tell if it owns their memory."""
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
        dtype: dtype of the sum of narrower gradients; by default the dtype of the gradients.
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


# -- residuals on their way: without parameters, on another device, or computed again from the inputs


class Held(NamedTuple):
    """Name a view of a parameter among residuals, so that the parameter itself may be freed meanwhile."""

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def release_params(low: LoweredStage, key: Key, buffers: Buffers) -> None:
    """Drop the parameters among the residuals, so that RESHARD can free them.

    Raises:
        TypeError: the engine keeps other objects than tensors.
    """
    params = buffers.params[low.model_stage]
    numbers = {address(t): n for n, t in enumerate(params) if t.numel()}
    fault = f"the parameters of stage {low.model_stage} cannot be freed between forward and backward"
    saved = _tensors(buffers, key, fault, "whole parameters")
    places = [numbers.get(address(t)) if isinstance(t, torch.Tensor) and t.numel() else None for t in saved]
    buffers.residuals[key] = tuple(
        [
            t if n is None else Held(n, t.shape, t.stride(), t.storage_offset())
            for t, n in zip(saved, places, strict=True)
        ]
    )


def restore_params(low: LoweredStage, key: Key, buffers: Buffers) -> None:
    """Put the parameters back where :func:`release_params` has dropped them."""
    params, saved = buffers.params[low.model_stage], buffers.residuals[key]
    buffers.residuals[key] = tuple(
        [
            params[t.number].as_strided(t.shape, t.stride, t.offset) if isinstance(t, Held) else t
            for t in saved
        ]
    )


class Moving(NamedTuple):
    """Hold residuals on their way to another device.

    Args:
        resting: all of them, with None for those that have moved.
        moving: copies of those that move, by their place in ``resting``.
        done: the event after which the copies are complete.
    """

    resting: tuple[Any, ...]
    moving: dict[int, torch.Tensor]
    done: torch.Event


def begin_offload(low: LoweredStage, key: Key, streams: SideStreams, buffers: Buffers) -> None:
    """Begin to copy residuals to the host while the device computes; :func:`offload` waits for the copies.

    Parameters, held by reference, stay where they are, and so do residuals on the host.
    """
    fault = f"the residuals of stage {low.model_stage} cannot be moved"
    saved = _tensors(buffers, key, fault, "a schedule without OFFLOAD")
    device, beside = low.device, streams[low.device]
    stay = {address(t) for t in buffers.params[low.model_stage]}
    moving = {
        n: t
        for n, t in enumerate(saved)
        if isinstance(t, torch.Tensor) and accelerates(t.device) and address(t) not in stay
    }
    beside.wait_stream(current_stream(device))
    with beside:
        copies = {n: download(t) for n, t in moving.items()}
        done = record_event(device)
    buffers.residuals[key] = Moving(saved, copies, done)


def offload(low: LoweredStage, key: Key, buffers: Buffers) -> None:
    """Let the device wait for the copies on the host, and free their originals."""
    saved, copies, done = buffers.residuals[key]
    done.wait(current_stream(low.device))
    resting = tuple([None if n in copies else t for n, t in enumerate(saved)])
    buffers.residuals[key] = Moving(resting, copies, done)


def fetch(low: LoweredStage, key: Key, streams: SideStreams, buffers: Buffers) -> None:
    """Begin to move residuals back; :func:`await_residuals` waits for them."""
    (resting, moving, _), device, beside = buffers.residuals[key], low.device, streams[low.device]
    beside.wait_stream(current_stream(device))
    with beside:
        back = {n: upload(t, device) for n, t in moving.items()}
        buffers.residuals[key] = Moving(resting, back, record_event(device))


def await_residuals(low: LoweredStage, key: Key, buffers: Buffers) -> None:
    """Let the device wait for residuals that are on their way back."""
    (resting, moving, done), here = buffers.residuals[key], current_stream(low.device)
    done.wait(here)
    for t in moving.values():
        t.record_stream(here)
    buffers.residuals[key] = tuple([moving.get(n, t) for n, t in enumerate(resting)])


def checkpointed(low: LoweredStage, key: Key, forward: Call, buffers: Buffers) -> None:
    """Keep the inputs and the state of a forward in place of its residuals, for :func:`recompute`."""
    x = tuple([t for tag in input_tags(low, key) for t in buffers.values[tag]])
    inputs = x + buffers.state.get(low.model_stage, ())
    forward(buffers)
    buffers.residuals[key] = inputs


def recompute(
    low: LoweredStage, key: Key, forward: Callable[[], Callable[..., Any]], buffers: Buffers
) -> None:
    """Run a forward again from the inputs that :func:`checkpointed` has kept; only its residuals are new.

    Args:
        forward: gets the function of the program.
    """
    count = sum(len(e.leaves) for e in low.sources)
    inputs, extras = buffers.residuals.pop(key), buffers.extras.get(key, ())
    arguments = buffers.params[low.model_stage], inputs[:count], extras + inputs[count:]
    buffers.residuals[key] = forward()(*arguments)[1]


def _tensors(buffers: Buffers, key: Key, fault: str, mend: str) -> tuple[Any, ...]:
    """Return the residuals; raise TypeError unless all are tensors, or views of parameters."""
    saved = buffers.residuals[key]
    if not all(isinstance(t, torch.Tensor | Held) for t in saved):
        raise TypeError(
            f"{fault}: its engine keeps values other than tensors; use the graph engine, or {mend}"
        )
    return saved


# -- sums over the places of a parameter


_Group = tuple[tuple[int, ...], tuple[int, ...], list[SharedLeaf]]
"""Ranks of the places, ascending; the rank of every place, in the order of the stages; the leaves."""


def sum_over_places(lowered: LoweredStep, transport: Transport) -> Iterator[PlacedCall]:
    """Sum the gradient of every shared leaf over its places.

    Each stage of the model gets the sum at its first place in this process.
    """
    leaves = lowered.shared_leaves()
    here = sorted({place.stage for leaf in leaves for place in leaf.places})
    if not here:
        return
    stage = here[0]
    rank = lowered.schedule.placement[stage]
    origin = Origin(rank, len(lowered.schedule.programs[rank]) - 1, Instruction(Op.REDUCE_TIED, stage))
    if not lowered.spec.updates:
        pairs = [(leaf, leaf.places[0], place) for leaf in leaves for place in leaf.places[1:]]
        yield partial(_compare_here, pairs), origin
        for ranks, _, of_group in _groups(lowered, leaves, lambda leaf: None):
            if len(ranks) > 1 and (collective := transport.collective(ranks)).size > 1:
                yield partial(_compare, ranks, of_group, collective), origin
    if not lowered.schedule.forward_only:
        yield _sum(lowered, transport, leaves, here), origin


def _groups(
    lowered: LoweredStep, leaves: Sequence[SharedLeaf], kind: Callable[[LeafSignature], object]
) -> list[_Group]:
    """Group leaves by the ranks of their places and the kind of their signatures, alike on all ranks."""
    groups: dict[tuple[tuple[int, ...], object], list[SharedLeaf]] = {}
    for leaf in leaves:
        _, model, number = leaf.places[0]
        key = leaf.homes, kind(lowered.form.params[model].leaves[number])
        groups.setdefault(key, []).append(leaf)
    placed = [(tuple(sorted(set(homes))), homes, of_group) for (homes, _), of_group in groups.items()]
    return sorted(placed, key=lambda group: group[:2])


def _compare_here(pairs: Sequence[tuple[SharedLeaf, Place, Place]], buffers: Buffers) -> None:
    names, flags = [], list[torch.Tensor]()
    for leaf, (_, first, at), (_, model, number) in pairs:
        value, other = buffers.params[first][at], buffers.params[model][number]
        if is_wrapped(other) != is_wrapped(value):
            raise ValueError(
                f"tied parameter {leaf.name}: a torch.func transform applies to one of the stages {first} and"
                f" {model} only; apply it to both"
            )
        if other is not value and not is_wrapped(value):
            names.append((f"{leaf.name} {OTHER_VALUES}", f"in stage {first}", f"in stage {model}"))
            flags.append(differing(other.to(value.device), value))

    def require(flags: torch.Tensor) -> None:
        if flags.any():
            raise AgreementError(differs(*names[int(flags.int().argmax())]))

    if flags:
        device = flags[0].device
        buffers.compared.append(Compared(torch.stack([flag.to(device) for flag in flags]), require))


def _compare(
    ranks: Sequence[int], leaves: Sequence[SharedLeaf], collective: Collective, buffers: Buffers
) -> None:
    """Compare leaves with their copies in other processes, by checksums that their device computes."""
    places = (leaf.places[0] for leaf in leaves)
    mine = torch.stack([checksum(buffers.params[model][number]) for _, model, number in places])
    whole, wait = collective.all_gather(mine)
    wait()

    def require(sums: torch.Tensor) -> None:
        if (sums == sums[0]).all():
            return
        for leaf, column in zip(leaves, sums.T.tolist(), strict=True):
            other = next((n for n, value in enumerate(column) if value != column[0]), None)
            if other is not None:
                one, another = (f"on rank {ranks[n]} (checksum {column[n] % 2**64:016x})" for n in (0, other))
                raise AgreementError(differs(f"{leaf.name} {OTHER_VALUES}", one, another))

    buffers.compared.append(Compared(whole.view(collective.size, -1), require))


def _sum(
    lowered: LoweredStep, transport: Transport, leaves: Sequence[SharedLeaf], here: Sequence[int]
) -> Call:
    """Sum the gradients of every group of leaves, and give the sums to the first of the stages that share."""
    model, numbers = lowered.schedule.model_stages, {stage: lowered.differentiated(stage) for stage in here}
    firsts = set({model[stage]: stage for stage in reversed(here)}.values())
    trained = [leaf for leaf in leaves if _trains(lowered, leaf.places[0])]
    groups, summed = [], Sum(lowered.spec.sum_dtype)
    for ranks, homes, of_group in _groups(lowered, trained, lambda leaf: summed.signature(leaf).dtype):
        collective = transport.collective(ranks) if len(ranks) > 1 else Collective()
        places = [leaf.places for leaf in of_group]
        groups.append((collective, places, list(map(ranks.index, homes))))

    def sum_gradients(buffers: Buffers) -> None:
        gradients = {}
        for stage in here:
            params = buffers.params[model[stage]]
            total = buffers.gradients[stage].take(tuple(params[n] for n in numbers[stage]), torch.clone)
            gradients[stage] = dict(zip(numbers[stage], total, strict=True))
        for collective, places, owners in groups:
            rows = [[gradients[p.stage][p.number] for p in row] for row in zip(*places, strict=True)]
            sums = collective.all_reduce_in_order(rows, owners)
            for gradient, of_leaf in zip(sums, places, strict=True):
                for stage, _, number in of_leaf:
                    gradients[stage][number] = gradient
        for stage in firsts:
            buffers.gradients[stage].put_back(tuple(gradients[stage].values()))

    return sum_gradients


def _trains(lowered: LoweredStep, place: Place) -> bool:
    """Tell whether a leaf gets gradients other than zeros."""
    frozen = lowered.spec.frozen_in(place.model, lowered.form.params[place.model])
    return place.number in lowered.differentiated(place.stage) and place.number not in frozen


# -- the update of parameters


def update_parameters(lowered: LoweredStep, places: Sequence[Origin]) -> Iterator[PlacedCall]:
    """Bind the REDUCE_GRAD and STEP that :func:`is_deferred` leaves to the end of the program."""
    rank = lowered.ranks[-1]
    deferred = [(call, place) for place in places if (call := update_call(lowered, place.instruction))]
    steps = [one for one in deferred if one[1].instruction.op is Op.STEP]
    end = Instruction(Op.STEP, lowered.schedule.stages_of(rank)[-1])
    place = steps[0][1] if steps else Origin(rank, len(lowered.schedule.programs[rank]) - 1, end)

    def join_losses(buffers: Buffers) -> None:
        weighted, each = apart(losses_of(lowered, buffers).values(), lowered.losses.values())
        _update(buffers).join(buffers, weighted, each if "losses" in lowered.spec.wants else None)

    join = join_losses, place
    yield from (one for one in deferred if one not in steps)
    yield from [join, *steps]


def losses_of(lowered: LoweredStep, buffers: Buffers) -> dict[int, torch.Tensor]:
    """Return the losses of a step, each times the weight of its microbatch, by stage of this process.

    A loss of weight 0 counts as 0, also where it is NaN, as the mean over no tokens is. If the loss of each
    microbatch is wanted, those before they were weighted come with them, see :class:`LossPart`.
    """
    weighted: dict[int, torch.Tensor] = {}
    for stage, part in lowered.losses.items():
        numbers = [m for m in lowered.schedule.numbers[stage] if lowered.stages[stage, m].loss is not None]
        each = [buffers.kept[stage, m][0] for m in numbers]
        rows = [
            torch.zeros_like(loss) if m in buffers.left_out else loss
            for m, loss in zip(numbers, each, strict=True)
        ]
        losses = torch.stack(rows).to(part.leaf.dtype)
        weights = torch.stack([buffers.weights[stage][m] for m in numbers])
        weights = weights.view(-1, *(1,) * (losses.ndim - 1))
        losses = torch.where(weights == 0, torch.zeros_like(losses), losses * weights)
        if part.each:
            losses = torch.stack([losses, torch.stack(each).to(part.leaf.dtype)])
        weighted[stage] = losses
    return weighted


def is_deferred(lowered: LoweredStep, instruction: Instruction) -> bool:
    """Tell whether an instruction has to wait until the program has run: a STEP for the gradients of all
    stages, a REDUCE_GRAD for a sum over places.
    """
    if instruction.op is Op.STEP:
        return True
    model_stages = lowered.schedule.model_stages
    places = (place for leaf in lowered.shared_leaves() for place in leaf.places)
    return model_stages[instruction.stage] in {place.model for place in places}


def update_call(lowered: LoweredStep, instruction: Instruction) -> Call | None:
    """Make the call of a REDUCE_GRAD or STEP, which the first replica here does for all of them."""
    schedule = lowered.schedule
    model_stage = schedule.model_stages[instruction.stage]
    first = next(
        stage
        for stage, k in enumerate(schedule.model_stages)
        if k == model_stage and schedule.placement[stage] in lowered.ranks
    )
    if instruction.stage != first:
        return None
    if instruction.op is Op.STEP:
        return lambda buffers: _update(buffers).step(buffers, model_stage)
    numbers = lowered.differentiated(first)
    return lambda buffers: _update(buffers).reduce(buffers, model_stage, buffers.gradients[first], numbers)


def sharding_call(lowered: LoweredStep, instruction: Instruction) -> Call:
    """Make the call of an UNSHARD or RESHARD."""
    model_stage = lowered.schedule.model_stages[instruction.stage]
    if instruction.op is Op.UNSHARD:
        return lambda buffers: _update(buffers).unshard(buffers, model_stage)
    return lambda buffers: buffers.params.update({model_stage: buffers.bare[model_stage]})


def await_params(model_stage: int, buffers: Buffers) -> None:
    """Wait for parameters that an UNSHARD, or the step before, gathers."""
    if model_stage in buffers.gathering:
        buffers.params[model_stage] = buffers.gathering.pop(model_stage)()


def _update(buffers: Buffers) -> ParameterUpdate:
    assert buffers.update is not None  # of a step with updates
    return buffers.update


# -- a forward and a backward as one, of an OVERLAP_F_B


@naming_arguments
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
            from ppfunc.stage.engines.tracing.emit import TracedFunction, interleave

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


@naming_arguments
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
    """Keep the allocator from the memory of a tensor until ``stream`` is done with it."""
    if isinstance(leaf, torch.Tensor) and accelerates(leaf.device):
        leaf.record_stream(stream)
