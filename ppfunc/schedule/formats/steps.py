"""Write a schedule in the form of DeepSpeed's instruction streams: every rank, step by step.

A line ``rank R``, then a line per step, its instructions separated by blanks, or ``-`` for an empty
step. An operation on a buffer names its slot, as in ``ForwardPass(buffer_id=0)``; one without a slot
names its microbatch, ``ForwardPass(micro_batch_id=3)``. What belongs to a whole stage has empty
parentheses, ``OptimizerStep()``. On a rank that holds several stages each names its own,
``ForwardPass(stage_id=2, micro_batch_id=3)``. An operation that DeepSpeed has no name for keeps its token,
``0W3``.
"""

from ..instruction import WHOLE_STAGE, Instruction, Op
from ..proof.structure import require_schedule
from ..schedule import Schedule

NAMES = {
    Op.F: "ForwardPass",
    Op.B: "BackwardPass",
    Op.SEND_F: "SendActivation",
    Op.RECV_F: "RecvActivation",
    Op.SEND_B: "SendGrad",
    Op.RECV_B: "RecvGrad",
    Op.LOAD: "LoadMicroBatch",
    Op.REDUCE_TIED: "ReduceTiedGrads",
    Op.REDUCE_GRAD: "ReduceGrads",
    Op.STEP: "OptimizerStep",
}


def to_steps(schedule: Schedule) -> str:
    """Return the streams of ``schedule`` in DeepSpeed's names.

    >>> from ppfunc.schedule import gpipe
    >>> print(to_steps(gpipe(ranks=1, microbatches=1)), end="")
    rank 0
    ForwardPass(micro_batch_id=0)
    BackwardPass(micro_batch_id=0)
    """
    require_schedule(schedule)
    lines = []
    for rank, program in enumerate(schedule.programs):
        lines.append(f"rank {rank}")
        several = len(schedule.stages_of(rank)) > 1
        lines += [" ".join(_name(i, several) for i in step) or "-" for step in program]
    return "\n".join(lines) + "\n"


def _name(instruction: Instruction, several: bool) -> str:
    if instruction.op not in NAMES:
        return str(instruction)
    arguments = [f"stage_id={instruction.stage}"] if several else []
    if instruction.slot is not None:
        arguments.append(f"buffer_id={instruction.slot}")
    elif instruction.op not in WHOLE_STAGE:
        arguments.append(f"micro_batch_id={instruction.microbatch}")
    return f"{NAMES[instruction.op]}({', '.join(arguments)})"
