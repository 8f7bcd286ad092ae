"""Define the parts of a step function, and the results that its caller wants of a step."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ppfunc.schedule import Schedule
from ppfunc.stage import LeafSignature, Loss, Stage
from ppfunc.stage.frozen import FrozenLeaves

from ..agreement.ties import Tied
from ..execution.buffers import Buffers
from ..execution.gradients import Gradients
from ..lowering.overlap import Overlapped
from ..lowering.stage_programs import StagePrograms
from ..transport.protocols import Transport
from .arguments import StepArguments


class ParameterUpdate(Protocol):
    """Carries out REDUCE_GRAD and STEP, UNSHARD and RESHARD, in steps that update parameters.

    Its methods read and write ``buffers.update_state``, which only it knows.
    """

    @property
    def together(self) -> bool:
        """Tell whether every STEP comes after ``join``; else each comes where the schedule has it."""
        ...

    @property
    def sharded(self) -> bool:
        """Tell whether parameters are whole only between UNSHARD and RESHARD."""
        ...

    def begin(self, steps: Sequence[StepArguments]) -> Sequence[StepArguments]:
        """Return the arguments that the steps of a call run with, before the first."""
        ...

    def sums(self, buffers: Buffers, stage: int, leaves: dict[int, LeafSignature]) -> Gradients | None:
        """Return what the gradients of a stage of the model are added up in; None for memory of the step.

        Args:
            leaves: by number, the signature of the sum of the gradients of a leaf.
        """
        ...

    def reduce(self, buffers: Buffers, stage: int, sums: Gradients, numbers: Sequence[int]) -> None:
        """Carry out REDUCE_GRAD of a stage of the model, for the leaves of these numbers."""
        ...

    def join(self, buffers: Buffers, losses: dict[int, torch.Tensor]) -> None:
        """Sum over all ranks, once in a program.

        It comes between the last REDUCE_GRAD and the first STEP, or at the end.

        Args:
            losses: weighted, by stage of the schedule.
        """
        ...

    def step(self, buffers: Buffers, stage: int) -> None:
        """Carry out STEP of a stage of the model.

        New parameters go into ``buffers.params`` for the next step of the call.
        """
        ...

    def unshard(self, buffers: Buffers, stage: int) -> None:
        """Carry out UNSHARD.

        Whole parameters go into ``buffers.params``, the shards into ``buffers.shards``.
        """
        ...

    def finish(self, buffers: Buffers) -> None:
        """Wait for what is under way, after the last step and before the call ends on all ranks."""
        ...

    def facts(self, update_state: Any) -> tuple[str, str]:
        """Return two texts of terms that ranks compare where they meet.

        All ranks agree on the first; on the second those that hold the same parameters for other batches.
        """
        ...

    def params(self, update_state: Any) -> Mapping[int, Any]:
        """Return the parameters by stage of the model, whole or the shards of this rank."""
        ...


class StepSpec(NamedTuple):
    """Name the results that the caller wants of a step, and how they are formed.

    Args:
        name: of the function that made it, with what changes the program; compared between ranks.
        wants: fields of :class:`~ppfunc.runtime.StepResult`, of ``"loss"``, ``"grads"``, ``"input_grads"``,
            ``"outputs"``, ``"aux"``.
        per_microbatch: keep the gradients of microbatches apart.
        loss_shape: shape of the loss of one microbatch.
        overlapped: runs the two parts of an ``OVERLAP_F_B``; by default one after the other.
        tied: the places of tied parameters.
        sum_dtype: of the sums of gradients, where that of a parameter is narrower.
        update: carries out REDUCE_GRAD and STEP, which are refused without it.
        finite: fail a step whose loss or gradients are not finite.
        frozen: the parameters that get zeros as gradients.
        primal: the key of the parameters proper where a transform has added tangents to them, such as
            ``"0."``.
    """

    name: str
    wants: tuple[str, ...]
    per_microbatch: bool = False
    loss_shape: tuple[int, ...] = ()
    overlapped: Overlapped | None = None
    tied: Tied = ()
    sum_dtype: torch.dtype | None = None
    primal: str = ""
    update: ParameterUpdate | None = None
    finite: bool = False
    frozen: FrozenLeaves | None = None


class Pipeline(NamedTuple):
    """Hold the parts of a step function.

    Args:
        stages, loss_fn: of the model; None for stages of other processes.
        schedule: proved, with communication placed.
        transport: carries messages between processes.
        spec: what is wanted of a step.
        programs: of the stages; step functions with the same stages may share them.
        ranks: those of this process.
    """

    stages: Sequence[Stage | None]
    loss_fn: Loss | None
    schedule: Schedule
    transport: Transport
    spec: StepSpec
    programs: StagePrograms
    ranks: tuple[int, ...]

    @property
    def model_stages(self) -> tuple[int, ...]:
        """List the stages of the model that this process runs, ascending."""
        return tuple(sorted({stage for rank in self.ranks for stage in self.schedule.model_stages_of(rank)}))
