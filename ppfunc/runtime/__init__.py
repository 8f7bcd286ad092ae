"""The runtime: a step is lowered, compiled and executed; all effects live here.

A step function is called, and the data flows in one direction::

    step.py          StepFunction(params, inputs, targets)
      arguments.py     read_arguments    what the caller gave  -> leaves, and the form of all trees (form.py)
      compiled_steps.py  find            the compiled step for this form, kept (cache.py) while its guards hold (guards.py), or new:
        agreement.py   begin             all ranks agree on the call and on the shapes of the batch (terms.py)
        lower.py       lower             stages, schedule, form -> LoweredStep (lowered.py): every edge        } once
        compile.py     compile_step      LoweredStep -> CompiledStep: stage programs, one flat list of calls   } per
        exchange.py    conclude          all ranks agree on the forms of losses and of shared parameters       } form
      run.py           run_step          the compiled step, run to its end on all ranks:
        passes.py      execute_passes    every pass in turn, each from the buffers of the one before:
          execute.py   fill, execute     leaves -> buffers of this pass alone; every call in turn
        results.py     collect           buffers -> losses, gradients, outputs, metrics, state
        transport      end               the sum of the losses; a step fails on every rank or on none

`spec.py` says what the caller wants of a step; `refusals.py` refuses what nothing would honour, `detached.py` warns of what would not
train. `calls.py` makes the calls of stage programs, `residual_calls.py` those that take residuals out of the way; `shared_sums.py`,
`input_gradients.py` and `update_calls.py` make those that end a program; `record.py` measures them; `nonfinite.py` runs passes again, to
find where a number was first not finite. What lasts from call to call belongs to two: `CompiledSteps` has what is compiled, `Agreement`
what the ranks agreed on. A transport is two protocols (`transport.py`), data and control, with three implementations: `InProcess`, `P2P`
and `Simulated`. Where several pipelines train together, `grid.py` says which rank belongs where, `layouts.py` compares how tensors lie
over them, and `collective.py` sums among them.

Between processes, from what a step sees down to sockets::

    p2p.py             P2P               the transport of a process, of both halves:
      control.py       Control           a step begins, ends or fails on all ranks (with Simulated, too)
        tree_messages.py                 messages to neighbours in a binary tree of ranks (rank_tree.py)
        links.py       Links             bytes between ranks, and which failure is the first
          socket_links.py  SocketLinks   over TCP: failure_tree.py decides on failures, suspects.py finds who holds up the others,
                                         meeting.py learns where ranks listen, first of a store (rendezvous.py),
                                         connections.py owns and watches the connections (sockets.py)
      pair_groups.py   PairGroups        tensors between two ranks, over gloo or NCCL; opening.py opens their communicators
"""

from .analysis import Lowered as Lowered
from .batch import Microbatches as Microbatches, microbatch as microbatch
from .cache import CacheInfo as CacheInfo
from .errors import AgreementError as AgreementError, PipelineError as PipelineError
from .grid import Axes as Axes
from .inprocess import InProcess as InProcess
from .lower import lower as lower
from .mesh import ProcessGroups as ProcessGroups, device_mesh as device_mesh, topology_of_mesh as topology_of_mesh
from .overlap import interleaved as interleaved, two_streams as two_streams
from .p2p import P2P as P2P
from .results import Aux as Aux, StepResult as StepResult
from .simulated import Fault as Fault, Simulated as Simulated
from .spec import StepSpec as StepSpec
from .step import StepFunction as StepFunction
from .transport import Transport as Transport
