"""Define the parts of a step function, and the results that its caller wants of a step."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ppfunc.schedule import Schedule
from ppfunc.stage import Loss, Stage
from ppfunc.stage.modules.frozen import FrozenLeaves

from ..agreement.ties import Tied
from ..lowering.overlap import Overlapped
from ..lowering.stage_programs import StagePrograms
from ..transport.protocols import Transport


class Updates(NamedTuple):
    """Describe the updates of parameters in a program.

    Args:
        together: every STEP comes after ``join``; else each comes where the schedule has it.
        sharded: parameters are whole only between UNSHARD and RESHARD.
    """

    together: bool
    sharded: bool


class StepSpec(NamedTuple):
    """Name the results that the caller wants of a step, and how they are formed.

    Args:
        name: of the function that made it, with what changes the program; compared between ranks.
        wants: fields of :class:`~ppfunc.runtime.StepResult`, of ``"loss"``, ``"grads"``, ``"input_grads"``,
            ``"outputs"``, ``"aux"``, ``"losses"``.
        per_microbatch: keep the gradients of microbatches apart.
        loss_shape: shape of the loss of one microbatch.
        overlapped: runs the two parts of an ``OVERLAP_F_B``; by default one after the other.
        tied: the places of tied parameters.
        sum_dtype: of the sums of gradients, where that of a parameter is narrower.
        updates: of parameters, by REDUCE_GRAD and STEP, which are refused without it.
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
    updates: Updates | None = None
    finite: bool = False
    frozen: FrozenLeaves | None = None


class Pipeline(NamedTuple):
    """Hold the parts of a step function.

    Args:
        stages, loss_fn: of the model; None for stages of other processes.
        schedule: proved, with communication placed.
        transport: carries messages between processes.
        spec: the results that the caller wants.
        programs: of the stages; step functions with the same stages may share them.
        ranks: those of this process.
        number: of the step function; ranks make theirs in the same order.
    """

    stages: Sequence[Stage | None]
    loss_fn: Loss | None
    schedule: Schedule
    transport: Transport
    spec: StepSpec
    programs: StagePrograms
    ranks: tuple[int, ...]
    number: int

    @property
    def model_stages(self) -> tuple[int, ...]:
        """List the stages of the model that this process runs, ascending."""
        return tuple(sorted({stage for rank in self.ranks for stage in self.schedule.model_stages_of(rank)}))
