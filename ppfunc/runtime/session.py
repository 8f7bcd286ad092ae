"""A step function at work: what it has agreed on with its peers, and what it has bound, is kept from call to call."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from hashlib import sha256
from typing import Any, NamedTuple

import optree
import torch

from ppfunc.schedule import Op, Schedule, parts_of
from ppfunc.stage import LeafSignature, Signature

from .batch import Batch, read_batch
from .interpreter import BATCH, Bound, Home, Memory, StepFailed, run
from .plan import Serve, Served, Table, bind_table, negotiate
from .transport import Failure, Tag, Transport

Leaves = tuple[torch.Tensor, ...]
# (stage, signature of params, of x, of the target or None, device) -> Served
Server = Callable[[int, Signature, Signature, Signature | None, torch.device], Served]


class Arguments(NamedTuple):
    """The arguments of one call, read.

    Args:
        leaves: leaves of the parameters of every local stage, without history.
        signatures: signatures of those.
        homes: where those live.
        inputs: the batch; None where this process holds no first stage and was given none.
        targets: the targets, likewise for the last stage.
        weights: weight of every microbatch, float64[m].
        seed: ``(seed, step)``, or None.
    """

    leaves: Mapping[int, Leaves]
    signatures: Mapping[int, Signature]
    homes: Mapping[int, Home]
    inputs: Batch | None
    targets: Batch | None
    weights: torch.Tensor
    seed: tuple[int, int] | None


class Step(NamedTuple):
    """A step that has run, before its memory is emptied."""

    schedule: Schedule
    transport: Transport
    memory: Memory
    table: Table
    arguments: Arguments

    def loss(self) -> torch.Tensor:
        """The weighted sum of the losses, a scalar, on every rank; added up in the order of the microbatches."""
        parts = []
        for chain, signature in zip(self.schedule.chains, self.table.losses, strict=True):
            last = chain.stages[-1]
            dtype, device = signature.leaves[0].dtype, self._device()
            weighted = ()
            if last in self.arguments.homes:
                losses = torch.stack([self.memory.kept[last, m][0] for m in chain.microbatches])
                weights = self.arguments.weights[chain.microbatches.start : chain.microbatches.stop]
                weighted = (losses * weights.to(losses.device, dtype),)
            leaf = LeafSignature((len(chain.microbatches),), dtype, False)
            (part,) = self.transport.spread(self.schedule.placement[last], weighted, (leaf,), device)
            parts.append(part.to(device))
        return torch.cat(parts).sum()

    def _device(self) -> torch.device:
        return next(iter(self.arguments.homes.values())).device

    def gradients(self) -> dict[int, Any]:
        """The gradients of every local stage, with the structure of its parameters."""
        seen: set[int] = set()
        return {stage: self._gradients_of(stage, seen) for stage in self.arguments.homes}

    def _gradients_of(self, stage: int, seen: set[int]) -> Any:
        leaves, home = self.arguments.leaves[stage], self.arguments.homes[stage]
        total = iter(self.memory.gradients[stage].take(home.differentiated(leaves), seen))
        filled = [next(total) if s.grad else torch.zeros_like(t) for t, s in zip(leaves, home.params, strict=True)]
        return self.arguments.signatures[stage].unflatten(filled)

    def outputs(self, skip: int) -> Any:
        """What the last stages returned, after the first ``skip`` leaves; None on other ranks."""
        rows: list[Any] = []
        for chain, signature in zip(self.schedule.chains, self.table.losses, strict=True):
            last = chain.stages[-1]
            if last not in self.arguments.homes:
                return None
            for m in chain.microbatches:
                tree = self.table.sent[last, m].unflatten(self.memory.kept[last, m])
                rows.append(tree[skip])
        shapes = {tuple(t.shape for t in optree.tree_leaves(row)) for row in rows}
        if len(shapes) > 1 or len({optree.tree_structure(row) for row in rows}) > 1:
            return rows
        return optree.tree_map(lambda *leaves: torch.stack(leaves), *rows)


class Session:
    """Owns the bound programs of one step function.

    Args:
        schedule: proved, with communication placed.
        transport: carries its messages.
        call: name of the step function; compared between ranks, as is the schedule.
        server: how a stage is served for its signatures.
        with_targets: whether the last stage takes targets.
    """

    def __init__(self, schedule: Schedule, transport: Transport, call: str, server: Server, with_targets: bool) -> None:
        self.schedule, self.transport = schedule, transport
        self.call = f"{call} with {schedule.name} of {schedule.microbatches} microbatches ({schedule.digest[:8]})"
        self.server, self.with_targets = server, with_targets
        self.local = transport.local_ranks(schedule.ranks)
        self.stages = tuple(s for s, r in enumerate(schedule.placement) if r in self.local)
        self.generation: int | None = None
        self.tables: dict[str, Table] = {}
        self.bound: dict[tuple, tuple[Bound, Table]] = {}

    def __call__(
        self,
        params: Mapping[int, Any],
        inputs: Any,
        targets: Any,
        weights: torch.Tensor,
        seed: tuple[int, int] | None,
        finish: Callable[[Step], Any],
    ) -> Any:
        """Run one step and return what ``finish`` makes of it; on any failure tell the peers.

        Raises:
            PipelineError: an instruction failed, here or on another rank.
            AgreementError: the ranks were given different programs or batches.
            ValueError, TypeError: the arguments do not fit the schedule.
        """
        memory = None
        try:
            arguments = self._read(params, inputs, targets, weights, seed)
            bound, table = self._prepare(arguments)
            memory = bound.memory
            self._fill(memory, table, arguments)
            # Under a torch.func transform from outside, that transform decides what is recorded.
            with torch.set_grad_enabled(torch.is_grad_enabled() and _transforming()), _generators(arguments):
                run(bound)
                return finish(Step(self.schedule, self.transport, memory, table, arguments))
        except StepFailed as failed:
            failure = failed.failure._replace(context=_given(failed.failure, table))
            raise self.transport.fail(failure) from failure.cause
        except BaseException as cause:
            error = self.transport.fail(Failure(self.local[0], None, None, cause))
            if error is cause:
                raise
            raise error from cause
        finally:
            if memory is not None:
                memory.clear()

    # -- arguments -------------------------------------------------------------------------

    def _read(
        self, params: Mapping[int, Any], inputs: Any, targets: Any, weights: torch.Tensor, seed: tuple[int, int] | None
    ) -> Arguments:
        if not isinstance(params, Mapping) or set(params) != set(self.stages):
            got = sorted(params) if isinstance(params, Mapping) else type(params).__name__
            raise ValueError(
                f"params: got {got}, expected a dictionary with the stages of this process, {list(self.stages)}: "
                f"{{stage: tree of parameters}}"
            )
        firsts = [c.stages[0] for c in self.schedule.chains]
        lasts = [c.stages[-1] for c in self.schedule.chains]
        inputs = self._read_batch(inputs, "inputs", firsts)
        targets = self._read_batch(targets, "targets", lasts if self.with_targets else [])
        signatures = {stage: Signature.of(params[stage], f"params[{stage}]") for stage in self.stages}
        leaves = {stage: tuple(map(_own, optree.tree_leaves(params[stage]))) for stage in self.stages}
        homes = {stage: Home(self._device(leaves, stage, inputs), signatures[stage].leaves) for stage in self.stages}
        return Arguments(leaves, signatures, homes, inputs, targets, weights, seed)

    def _read_batch(self, batch: Any, name: str, needed_by: list[int]) -> Batch | None:
        if batch is not None:
            return read_batch(batch, self.schedule.microbatches, name)
        here = [stage for stage in needed_by if stage in self.stages]
        if here:
            raise ValueError(f"{name}: got None, but this process holds stage {here[0]}, which needs them")
        return None

    def _device(self, leaves: Mapping[int, Leaves], stage: int, inputs: Batch | None) -> torch.device:
        """Where a stage computes: with its parameters; without any, with its neighbours' or the batch."""
        near = sorted(self.stages, key=lambda s: abs(s - stage))
        found = next((leaves[s][0].device for s in near if leaves[s]), None)
        if found is None and inputs is not None:
            found = next((t.device for row in inputs.leaves for t in row), None)
        return found or torch.get_default_device()

    # -- programs --------------------------------------------------------------------------

    def _prepare(self, arguments: Arguments) -> tuple[Bound, Table]:
        """The bound program of this batch's shape; worked out with the peers where it is new."""
        key = self.transport.begin(self.call, None if arguments.inputs is None else _key(arguments.inputs))
        if self.generation != self.transport.generation:
            self._open()
        targets = None if arguments.targets is None else arguments.targets.signatures
        own = (key, tuple(arguments.signatures.values()), tuple(h.device for h in arguments.homes.values()), targets)
        if own not in self.bound:
            serve = self._serve(arguments)
            if key not in self.tables:
                inputs = arguments.inputs
                self.tables[key] = negotiate(self.schedule, self.transport, serve, lambda m: inputs.signatures[m])
            table = self.tables[key]
            self.bound[own] = bind_table(self.schedule, self.transport, arguments.homes, table, serve), table
        return self.bound[own]

    def _serve(self, arguments: Arguments) -> Serve:
        """Serves the stages of this process with the parameters and targets of this call."""
        lasts = {c.stages[-1] for c in self.schedule.chains} if self.with_targets else set()

        def serve(stage: int, microbatch: int, x: Signature) -> Served:
            target = arguments.targets.signatures[microbatch] if stage in lasts else None
            served = self.server(stage, arguments.signatures[stage], x, target, arguments.homes[stage].device)
            if served.random and arguments.seed is None:
                raise ValueError(f"stage {stage} draws random numbers; pass seed=(seed, step) to the step, two integers")
            return served

        return serve

    def _open(self) -> None:
        """Compare with the peers what must be the same everywhere, and connect; again after a failure."""
        self.tables.clear()
        self.bound.clear()
        self.transport.agree(
            {
                "schedule": f"{self.schedule.name} of {self.schedule.microbatches} microbatches ({self.schedule.digest[:16]})",
                "version of torch": torch.__version__,
                "version of Python": platform.python_version(),
            }
        )
        self.transport.connect(_pairs(self.schedule))
        self.generation = self.transport.generation

    # -- one step --------------------------------------------------------------------------

    def _fill(self, memory: Memory, table: Table, arguments: Arguments) -> None:
        memory.params.update(arguments.leaves)
        memory.seed = arguments.seed
        for chain, signature in zip(self.schedule.chains, table.losses, strict=True):
            first, last = chain.stages[0], chain.stages[-1]
            if first in self.stages:
                for m in chain.microbatches:
                    memory.values[Tag("F", BATCH, first, m)] = arguments.inputs.leaves[m]
            if last in self.stages and self.with_targets:
                weights = arguments.weights.to(arguments.homes[last].device, signature.leaves[0].dtype).unbind()
                for m in chain.microbatches:
                    memory.constants[last, m] = arguments.targets.leaves[m]
                    memory.weights[last, m] = (weights[m],)


def _key(inputs: Batch) -> str:
    """A name for the shape of a batch, the same on every rank that has the same batch."""
    distinct = dict.fromkeys(inputs.signatures)
    index = {signature: n for n, signature in enumerate(distinct)}
    text = "\n".join([*(s.to_json() for s in distinct), *(str(index[s]) for s in inputs.signatures)])
    return f"{len(inputs.signatures)} microbatches {sha256(text.encode()).hexdigest()[:16]}"


def _generators(arguments: Arguments) -> AbstractContextManager[None]:
    """Puts the generators back after a step that seeds them."""
    if arguments.seed is None:
        return nullcontext()
    return torch.random.fork_rng({h.device for h in arguments.homes.values() if h.device.type == "cuda"})


def _transforming() -> bool:
    """Whether a torch.func transform is at work outside."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _given(failure: Failure, table: Table) -> str:
    """What the stage of a failed forward was given."""
    for part in parts_of(failure.instruction):
        if part.op is Op.F and isinstance(failure.cause, Exception):
            return f"; its input was {table.received[part.stage, part.microbatch]}"
    return ""


def _own(leaf: torch.Tensor) -> torch.Tensor:
    """A parameter without its history, so that nothing outside grows with the steps."""
    if leaf.requires_grad and not torch._C._functorch.is_functorch_wrapped_tensor(leaf):
        return leaf.detach()
    return leaf


def _pairs(schedule: Schedule) -> list[tuple[int, int]]:
    """The pairs of ranks that exchange messages: along edges, and between copies of a stage."""
    home = schedule.placement
    pairs = {(home[a], home[b]) for a, b in schedule.edges}
    pairs |= {(home[a], home[b]) for group in schedule.copies for a in group for b in group}
    return sorted({(min(p), max(p)) for p in pairs if p[0] != p[1]})
