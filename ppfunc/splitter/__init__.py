"""Split any ``torch.nn`` module into stages by the names of its modules.

One call of the model is traced without values (`trace`): its operators are recorded above autograd and
autocast (`record`), with the modules in which they are called. The trace is cut where the named modules begin
(`cut`): values that later stages need cross, and cheap values are computed again where they are needed. Each
part is written as straight-line code, and kept for every form of the inputs, which the stage functions
(`value`) look up.

A stage function traces the **whole** model, inside the trace of that one stage, when it first meets a form of
the inputs (`Source.codes`): this trace gives the code of all stages, and the others look it up. Each process
traces the model once per form.
"""

from typing import TYPE_CHECKING

from ppfunc._lazy import attach

if TYPE_CHECKING:
    from .splitting import split as split
    from .value import Split as Split, materialize as materialize
else:
    __getattr__, __dir__, __all__ = attach(__name__, {"splitting": "split", "value": "Split materialize"})
