"""Hold the memory of one call of a compiled step: made for the call, dropped with it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from ppfunc.schedule import Instruction, Op
from ppfunc.stage import LeafSignature
from ppfunc.stage.device import upload

Leaves = tuple[torch.Tensor, ...]
Key = tuple[int, int]  # (stage of the schedule, microbatch)


class Tag(NamedTuple):
    """Name a message, the same at both ends.

    Args:
        direction: ``"F"`` for activations, ``"B"`` for their gradients.
        source, destination: stages of the schedule, the producer and the consumer of the message; or
            ``BATCH``, ``CALLER``.
        microbatch: the microbatch that has made the value, or the gradient of the value.
    """

    direction: str
    source: int
    destination: int
    microbatch: int


class Origin(NamedTuple):
    """Name the place of a call in the schedule.

    Args:
        rank, position: rank, and step of its program.
        instruction: instruction to which the call belongs.
        awaited: message that a call before the instruction waits for, or LOAD or UNSHARD for what it brings
            otherwise; None for the work of the instruction.
    """

    rank: int
    position: int
    instruction: Instruction
    awaited: Tag | Op | None = None


class Compared(NamedTuple):
    """Hold the result of a comparison on a device, which is read at the end of the step with its losses.

    Args:
        values: result of the comparison, on the device until a transport has it.
        require: raises AgreementError for values that show a difference.
    """

    values: torch.Tensor
    require: Callable[[torch.Tensor], None]


# One tensor of the parameter's shape and dtype per leaf, None for zero.
LeafGradients = tuple[torch.Tensor | None, ...]
# Of leaves, ascending; a range of all of them, which is looked up in no time.
Numbers = tuple[int, ...] | range
# Returns a tensor, or a copy where anything else uses its memory.
Owner = Callable[[torch.Tensor], torch.Tensor]


class Gradients(Protocol):
    """Takes the gradients of microbatches in turn and makes a tree of them."""

    def add(self, gradients: Leaves, numbers: Numbers, microbatch: int, fresh: bool = False) -> None:
        """Add gradients of one microbatch, for the leaves of these numbers, each once.

        A leaf that gets none counts as zero. It is fastest if every microbatch groups its leaves alike.

        Args:
            fresh: whether nothing else lies in the memory of the gradients, which then may be written.
        """

    def totals(self) -> tuple[torch.Tensor | None, ...] | None:
        """Return the sums that a program may write instead of calling ``add``, by number of the leaf.

        Returns:
            None for a leaf whose gradients go by ``add``; None alone where those of all leaves do.
        """

    def put_back(self, gradients: Leaves) -> None:
        """Replace the gradients of ``take`` by sums over all places of the parameters."""

    def signature(self, leaf: LeafSignature) -> LeafSignature:
        """Return the signature of the result for a parameter of this signature."""

    def take(self, like: Leaves, owned: Owner) -> Leaves:
        """Return the result for parameters ``like``, and drop it here.

        The caller owns it, unless it lies in the buckets of an update.
        """


@dataclass(slots=True)
class Buffers:
    """Holds everything that the calls of a program read and write; two calls of a step share nothing of it.

    Args:
        params: leaves of the parameters, by stage of the model.
        shards: this rank's parts of parameters that are whole only between UNSHARD and RESHARD, by stage of
            the model.
        gathering: functions that wait for gathered parameters and return them, by stage of the model: of an
            UNSHARD, or of the update of the step before.
        bare: the parameters in the form in which they were given; without memory if they are whole only
            between UNSHARD and RESHARD.
        extras: leaves that are not differentiated (targets, extras), by (stage, microbatch).
        state: leaves of the state, by stage of the model; each forward takes it and puts the new one there.
        cotangents: cotangent of the loss, which is the weight of the microbatch, by (stage, microbatch).
        values: messages between stages, by tag.
        residuals: values that a backward needs of its forward, and a weight gradient of its input gradient,
            by (stage, microbatch).
        kept: outputs that belong to the caller, by (stage, microbatch).
        kept_before: outputs that earlier steps of the same call have kept.
        gradients: sums of the parameter gradients so far, by stage of the schedule.
        seed: ``(seed, step)``, None where the caller gave none.
        weights: weights of the losses of all microbatches, scalars, by stage of the schedule.
        left_out: the microbatches whose weight is known to be 0, of which no backward runs.
        scale: factor of the cotangents of the loss, None for 1.
        microbatch_offset: the number of the first microbatch among those of all data ranks.
        update: updates the parameters in this call.
        compared: comparisons of this step.
        pending: messages that the transport has posted and not waited for, by tag; only the transport looks
            into it.
    """

    params: dict[int, Leaves] = field(default_factory=dict)
    shards: dict[int, Leaves] = field(default_factory=dict)
    gathering: dict[int, Callable[[], Leaves]] = field(default_factory=dict)
    bare: Mapping[int, Leaves] = field(default_factory=dict)
    extras: dict[Key, Leaves] = field(default_factory=dict)
    state: dict[int, Leaves] = field(default_factory=dict)
    cotangents: dict[Key, Leaves] = field(default_factory=dict)
    values: dict[Tag, Leaves] = field(default_factory=dict)
    residuals: dict[Key, tuple[Any, ...]] = field(default_factory=dict)
    kept: dict[Key, Leaves] = field(default_factory=dict)
    kept_before: list[dict[Key, Leaves]] = field(default_factory=list)
    gradients: dict[int, Gradients] = field(default_factory=dict)
    seed: tuple[int, int] | None = None
    weights: dict[int, Leaves] = field(default_factory=dict)
    left_out: frozenset[int] = frozenset()
    scale: torch.Tensor | None = None
    microbatch_offset: int = 0
    update: "ParameterUpdate | None" = None
    compared: list[Compared] = field(default_factory=list)
    pending: dict[Tag, Any] = field(default_factory=dict)


class ParameterUpdate(Protocol):
    """Carries out REDUCE_GRAD and STEP, UNSHARD and RESHARD in the steps of one call.

    Attributes:
        known: the ranks know that its facts go together; else they compare them.
    """

    known: bool

    def facts(self) -> tuple[str, Mapping[tuple[str, ...], str]]:
        """Return the terms that ranks compare: a text for all ranks, and one per set of axes."""

    def alike(self) -> Iterable[tuple[str, Mapping[int, Sequence[torch.Tensor | None]]]]:
        """Yield values that must be equal at all places of a shared parameter.

        Each item is the words for an error, and by stage of the model one value per leaf, None for a leaf
        that is not compared.
        """

    def patterns(self) -> Mapping[str, bool]:
        """Tell of every pattern of names whether it takes a leaf of this process; some rank's has to."""

    def begin(self, weights: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Return the loss weight of every step that this call runs. Called once, before the first step.

        Args:
            weights: weights as the caller gave them, one tensor per step; None for the default.
        """

    def accumulator(self, stage: int, leaves: Iterable[tuple[int, LeafSignature]]) -> Gradients | None:
        """Return the accumulator for the gradients of a stage of the model. None adds them up in the step.

        Args:
            leaves: the number of each that gets a gradient, and the signature of their sum.
        """

    def reduce(self, buffers: Buffers, stage: int, gradients: Gradients, numbers: Sequence[int]) -> None:
        """Carry out REDUCE_GRAD of a stage of the model, for the leaves of these numbers."""

    def join(
        self, buffers: Buffers, losses: Sequence[torch.Tensor], each: Mapping[int, torch.Tensor] | None
    ) -> None:
        """Sum over all ranks, once in a program.

        It comes between the last REDUCE_GRAD and the first STEP, or at the end.

        Args:
            losses: weighted, of the stages of this process.
            each: losses of this process by microbatch, not weighted; None if they are not wanted.
        """

    def step(self, buffers: Buffers, stage: int) -> None:
        """Carry out STEP of a stage of the model.

        What waits for new parameters goes into ``buffers.gathering``, for the next step of the call.
        """

    def unshard(self, buffers: Buffers, stage: int) -> None:
        """Post the gathers of an UNSHARD.

        Keep the shards in ``buffers.shards``, and the function that waits for the whole parameters in
        ``buffers.gathering``.
        """

    def finish(self) -> None:
        """Wait for operations under way, after the last step and before the call ends on all ranks."""


def moved(tensors: Leaves, device: torch.device) -> Leaves:
    """Move tensors to a device. A copy to the host is complete on return."""
    return tuple([upload(t, device) for t in tensors])
