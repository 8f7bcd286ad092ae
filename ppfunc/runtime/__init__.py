"""Run steps: lower, compile and execute them; all effects live here.

Six rooms. A step function is called, and the data flows in one direction::

    call/step.py        StepFunction(params, inputs, targets)
      call/arguments.py      what the caller gave -> leaves, and the form of all trees
      lowering/compiled_steps.py      the compiled step for this form, kept while its guards hold, or new:
        agreement/agreement.py          all ranks agree on the call and on the shapes of the batch
        lowering/lower.py               stages, schedule, form -> LoweredStep: every edge
        lowering/compile.py             LoweredStep -> CompiledStep: one flat list of calls
        agreement/agreement.py          all ranks agree on the forms of losses and of shared parameters
      execution/execute.py            the compiled step, run to its end on all ranks:
        execution/execute.py            leaves -> buffers of this step alone; every call in turn
        call/results.py                 buffers -> losses, gradients, outputs, metrics, state
        transport/                      carries messages between stages, and sums among ranks
        control/                        the sum of the losses; a step fails on every rank or on none

Four objects last from call to call: `StagePrograms` owns the programs of stages, `CompiledSteps` the compiled
steps, `Agreement` the facts that the ranks agreed on, `StepFunction` the addresses of the parameters.
`errors.py` has the errors of a step, and the form in which ranks send them. Each room's docstring draws its
own flow.
"""

from typing import TYPE_CHECKING

from ppfunc._lazy import attach

if TYPE_CHECKING:
    from .call.batch import Microbatches as Microbatches, replicated as replicated
    from .call.forms import microbatch as microbatch
    from .call.results import Aux as Aux, StepResult as StepResult
    from .call.step import StepFunction as StepFunction
    from .errors import AgreementError as AgreementError, PipelineError as PipelineError
    from .lowering.analysis import CompiledFunction as CompiledFunction, LoweredFunction as LoweredFunction
    from .lowering.compiled_steps import CacheInfo as CacheInfo
    from .lowering.lower import lower as lower
    from .lowering.lowered import StepSpec as StepSpec
    from .lowering.overlap import interleaved as interleaved, two_streams as two_streams
    from .transport.grid import Axes as Axes
    from .transport.inprocess import InProcess as InProcess, OnPaper as OnPaper
    from .transport.p2p import P2P as P2P
    from .transport.protocols import Transport as Transport
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "call.batch": "Microbatches replicated",
            "call.forms": "microbatch",
            "call.results": "Aux StepResult",
            "call.step": "StepFunction",
            "errors": "AgreementError PipelineError",
            "lowering.analysis": "CompiledFunction LoweredFunction",
            "lowering.compiled_steps": "CacheInfo",
            "lowering.lower": "lower",
            "lowering.lowered": "StepSpec",
            "lowering.overlap": "interleaved two_streams",
            "transport.grid": "Axes",
            "transport.inprocess": "InProcess OnPaper",
            "transport.p2p": "P2P",
            "transport.protocols": "Transport",
        },
    )
