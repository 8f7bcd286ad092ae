"""A step function at work: what it has agreed on with its peers, and what it has bound, is kept from call to call."""

from __future__ import annotations

import platform
import reprlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from hashlib import sha256
from itertools import permutations
from typing import Any, NamedTuple

import torch

from ppfunc.schedule import Op, Schedule, parts_of
from ppfunc.stage import Signature

from .arguments import Arguments, Given, read_arguments
from .batch import Batch
from .calls import BATCH
from .errors import AgreementError
from .generators import put_back
from .gradients import Gradients
from .interpreter import Bound, StepFailed, run
from .memory import Memory
from .outside import transforming
from .plan import Serve, Served, Table, bind_table, negotiate, renew
from .results import Step
from .serving import Server, autocast
from .thunks import Overlapped
from .transport import Failure, Route, Tag, Transport


_BEFORE = "; run before: "


class Work(NamedTuple):
    """What the calls of one step function have in common.

    Args:
        call: its name; compared between ranks, as is the schedule.
        server: how a stage is served for its signatures.
        with_targets: whether the last stage takes targets.
        wants_inputs: whether gradients of the inputs are wanted.
        gradients: makes what takes the gradients of one stage.
        finish: what to return of a step that has run.
        together: runs the two parts of an overlapped pair; in turn where there is none.
    """

    call: str
    server: Server
    with_targets: bool
    wants_inputs: bool
    gradients: Callable[[], Gradients]
    finish: Callable[[Step], Any]
    together: Overlapped | None = None


class Session:
    """Owns the bound programs of one step function.

    Args:
        schedule: proved, with communication placed.
        transport: carries its messages.
        work: what to do.
    """

    def __init__(self, schedule: Schedule, transport: Transport, work: Work) -> None:
        self.schedule, self.transport, self.work = schedule, transport, work
        self.local = transport.local_ranks(schedule.ranks)
        number = transport.enroll()
        self.call = (
            f"step function {number} ({work.call}); {schedule.name[:60]} of {schedule.microbatches} microbatches ({schedule.digest[:8]})"
        )
        self.stages = tuple(s for s, r in enumerate(schedule.placement) if r in self.local)
        self.generation: int | None = None
        self.tables: dict[tuple[str, Hashable], Table] = {}
        self.bound: dict[tuple, tuple[Bound, Table]] = {}

    def __call__(self, given: Callable[[], Given]) -> Any:
        """Run one step; on any failure tell the peers.

        Args:
            given: gathers the arguments; what it raises is told like everything else.

        Raises:
            PipelineError: an instruction failed, here or on another rank.
            AgreementError: the ranks were given different programs or batches.
            ValueError, TypeError: the arguments do not fit the schedule.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self(given)
        memory = None
        try:
            if transforming() and len(self.local) < self.schedule.ranks:
                raise ValueError(
                    "got a step under a torch.func transform, whose ranks are in several processes, where the transform "
                    "would end at each message; run it with InProcess(), or use ppfunc.jvp, hvp, gnvp, ensemble or per_sample_grad"
                )
            arguments = read_arguments(given(), self.schedule, self.stages, self.work.with_targets)
            if self.work.wants_inputs and arguments.inputs is not None:
                arguments = arguments._replace(inputs=arguments.inputs.differentiable())
            bound, table = self._prepare(arguments)
            memory = bound.memory
            self._fill(memory, table, arguments)
            # Under a torch.func transform from outside, that transform decides what is recorded.
            with torch.set_grad_enabled(torch.is_grad_enabled() and transforming()), _generators(arguments):
                run(bound)
                result = self.work.finish(Step(self.schedule, self.transport, memory, table, arguments))
            self.transport.end()
            return result
        except StepFailed as failed:
            failure = failed.failure._replace(context=_given(failed.failure, table))
            error = self.transport.fail(failure)
            if not isinstance(failure.cause, Exception):
                raise failure.cause from None  # an interrupt stays what it is
            raise error from failure.cause
        except BaseException as cause:
            error = self.transport.fail(Failure(self.local[0], None, None, cause))
            if error is cause or not isinstance(cause, Exception):
                raise
            raise error from cause
        finally:
            error = failure = None  # an error that is kept keeps this frame, and must not be kept by it
            if memory is not None:
                memory.clear()

    def _prepare(self, arguments: Arguments) -> tuple[Bound, Table]:
        """The bound program of this batch's shape; worked out with the peers where it is new."""
        call = self.call if len(self.local) == self.schedule.ranks else f"{self.call}; {_terms(arguments)}"
        agreed = self.generation == self.transport.generation
        mine = None if arguments.inputs is None else _key(arguments.inputs)
        key, _, before = self.transport.begin(call, mine and f"{mine}{self._before(mine, agreed)}").partition(_BEFORE)
        if self._before(key, agreed) != _BEFORE + before:
            raise AgreementError(
                f"the ranks disagree on the step that begins: whether it has run with these shapes before, rank 0 says {before}, "
                f"rank {self.local[0]} does not; every rank must call the same step function, under the same autocast"
            )
        if not agreed:
            self._open()
        own = (key, self.work.server.mode(), *_local_key(arguments))
        if own not in self.bound:
            serve = self._serve(arguments)
            if (key, autocast()) in self.tables:
                table = renew(self.schedule, self.tables[key, autocast()], serve, arguments.signatures)
            else:
                table = negotiate(self.schedule, self.transport, serve, arguments)
                self.tables[key, autocast()] = table
            bound = bind_table(self.schedule, self.transport, arguments.homes, table, self.work.gradients, self.work.together)
            self.bound[own] = bound, table
        return self.bound[own]

    def _before(self, key: str, agreed: bool) -> str:
        """Says whether the ranks have agreed on this shape of the batch before, which all of them have or none."""
        return _BEFORE + ("yes" if agreed and (key, autocast()) in self.tables else "no")

    def _serve(self, arguments: Arguments) -> Serve:
        """Serves the stages of this process with the arguments of this call."""
        lasts = {c.stages[-1] for c in self.schedule.chains} if self.work.with_targets else set()

        def serve(stage: int, microbatch: int, x: Signature) -> Served:
            constants = arguments.constants(stage, microbatch, stage in lasts)
            key = (arguments.signatures[stage], arguments.strides[stage])
            device = arguments.homes[stage].device
            served = self.work.server(stage, key, lambda: arguments.example(stage), x, constants, device)
            if served.random and arguments.seed is None:
                raise ValueError(f"stage {stage} draws random numbers; pass seed=(seed, step) to the step, two integers")
            return served

        return serve

    def _open(self) -> None:
        """Compare with the peers what must be the same everywhere, and connect; again after a failure."""
        self.tables.clear()
        self.bound.clear()
        facts = (
            f"{self.schedule.name} of {self.schedule.microbatches} microbatches ({self.schedule.digest[:16]}), "
            f"torch {torch.__version__}, Python {platform.python_version()}"
        )
        for rank, theirs in enumerate(self.transport.share(facts)):
            if theirs != facts:
                raise AgreementError(
                    f"the ranks disagree: rank {self.local[0]} has {facts}; rank {rank} has {theirs}; every rank must be given the same"
                )
        self.transport.connect(_routes(self.schedule))
        self.generation = self.transport.generation

    def _fill(self, memory: Memory, table: Table, arguments: Arguments) -> None:
        """Put the arguments where the program reads them."""
        memory.params.update(arguments.leaves)
        memory.state.update(arguments.state)
        memory.seed = arguments.seed
        for chain in self.schedule.chains:
            first, last = chain.stages[0], chain.stages[-1]
            for stage in chain.stages:
                if stage in table.losses and stage in self.stages:
                    loss = table.losses[stage]
                    weights = arguments.weights.to(arguments.homes[stage].device, loss.dtype).unbind()
                    memory.weights.update(((stage, m), (weights[m].expand(loss.shape),)) for m in chain.microbatches)
                if stage in self.stages:
                    batches = [*([arguments.targets] if stage == last and self.work.with_targets else [])]
                    batches += [arguments.side[stage]] if stage in arguments.side else []
                    if batches:
                        for m in chain.microbatches:
                            memory.constants[stage, m] = sum((b.leaves[m] for b in batches), ())
            if first in self.stages:
                for m in chain.microbatches:
                    memory.values[Tag("F", BATCH, first, m)] = arguments.inputs.leaves[m]


def _key(inputs: Batch) -> str:
    """A name for the shape of a batch, the same on every rank that has the same batch."""
    distinct = dict.fromkeys(inputs.signatures)
    index = {signature: n for n, signature in enumerate(distinct)}
    text = "\n".join([*(s.to_json() for s in distinct), *(str(index[s]) for s in inputs.signatures)])
    shown = ", ".join(map(str, distinct))
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return f"{len(inputs.signatures)} microbatches of {shown} {sha256(text.encode()).hexdigest()[:16]}"


def _terms(arguments: Arguments) -> str:
    """The weights of the microbatches and the seed, the same text on every rank that has the same ones."""
    weights = arguments.weights.tolist()
    told = f"{weights[0]:.4g} each" if len(set(weights)) == 1 else ", ".join(f"{w:.4g}" for w in weights)
    told = told if len(told) <= 60 else f"{told[:57]}..."
    return f"weights {told} ({sha256(repr(weights).encode()).hexdigest()[:8]}); seed {reprlib.repr(arguments.seed)}"


def _local_key(arguments: Arguments) -> tuple:
    """What the bound program depends on beside the shape of the batch."""
    targets = None if arguments.targets is None else arguments.targets.signatures
    return (
        tuple(arguments.signatures.values()),
        tuple(arguments.strides.values()),
        tuple(home.device for home in arguments.homes.values()),
        targets,
        tuple((stage, batch.signatures) for stage, batch in arguments.side.items()),
        tuple(arguments.states.items()),
    )


def _generators(arguments: Arguments) -> AbstractContextManager[None]:
    """Puts the generators back after a step that seeds them."""
    if arguments.seed is None:
        return nullcontext()
    return put_back(home.device for home in arguments.homes.values() if home.device.type == "cuda")


def _given(failure: Failure, table: Table) -> str:
    """What the stage of a failed forward was given."""
    for part in parts_of(failure.instruction):
        if part.op is Op.F and isinstance(failure.cause, Exception):
            return f"; its input was {', '.join(map(str, table.received[part.stage, part.microbatch]))}"
    return ""


def _routes(schedule: Schedule) -> Iterator[Route]:
    """Where messages travel between ranks: along edges and back, and between the copies of a stage."""
    home = schedule.placement
    for a, b in schedule.crossing_edges:
        yield Route("F", home[a], home[b])
        if not schedule.forward_only:
            yield Route("B", home[b], home[a])
    for group in () if schedule.forward_only else schedule.replicas:
        for a, b in permutations(group, 2):
            if home[a] != home[b]:
                yield Route("R", home[a], home[b])
