"""Run steps: lower, compile and execute them; all effects live here.

A step function is called, and the data flows in one direction, through rooms of which each imports only
those above it in this list::

    values/        leaves, forms, buffers, errors: what is handed on
    ports/         what a step asks of others
    lowering/      stages, schedule, form -> LoweredStep: every edge, agreed among all ranks
    running/       LoweredStep -> CompiledStep: one flat list of calls; every call in turn
    control/       a step fails on every rank or on none; the sum of the losses
    transport/     messages between processes, and sums among ranks: `P2P`
    paper/         what is known before anything runs: text, bytes, operations

`step.py` is the loop: a call from its arguments to its result, and the compiled steps that are kept while
their stages read the same values. Three objects last from call to call: `StagePrograms` owns the programs of
stages, `Agreement` the facts that the ranks agreed on, `StepFunction` the compiled steps. Each room's
docstring draws its own flow.
"""

from typing import TYPE_CHECKING

from ppfunc._lazy import attach

if TYPE_CHECKING:
    from .lowering.lower import Aux as Aux, StepResult as StepResult, StepSpec as StepSpec, lower as lower
    from .paper.analysis import (
        CompiledFunction as CompiledFunction,
        LoweredFunction as LoweredFunction,
        OnPaper as OnPaper,
    )
    from .paper.ledger import Allocation as Allocation, Bytes as Bytes, Memory as Memory, Moment as Moment
    from .paper.memories import Memories as Memories
    from .ports.protocols import Axes as Axes, InProcess as InProcess, Transport as Transport
    from .running.calls import interleaved as interleaved, two_streams as two_streams
    from .step import CacheInfo as CacheInfo, StepFunction as StepFunction
    from .transport.p2p import P2P as P2P
    from .values.arguments import (
        Microbatches as Microbatches,
        microbatch as microbatch,
        replicated as replicated,
    )
    from .values.errors import AgreementError as AgreementError, PipelineError as PipelineError
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "values.arguments": "Microbatches microbatch replicated",
            "step": "CacheInfo StepFunction",
            "values.errors": "AgreementError PipelineError",
            "paper.analysis": "CompiledFunction LoweredFunction OnPaper",
            "paper.ledger": "Allocation Bytes Memory Moment",
            "paper.memories": "Memories",
            "lowering.lower": "Aux StepResult StepSpec lower",
            "running.calls": "interleaved two_streams",
            "transport.p2p": "P2P",
            "ports.protocols": "Axes InProcess Transport",
        },
    )
