"""Differentiate a stage: the engines ``graph``, ``functional`` and ``eager``.

An engine is a function ``engine(fn, example) -> StageProgram``. All reduce the stage to a function of its
differentiable leaves (`ppfunc.stage.abstract.differentiable`), and give the same gradients::

    graph        trace forward and backward (`tracing.joint`), clean the trace (`tracing.clean`), choose
                 what is computed again (`tracing.again`), cut it in F, I and W (`tracing.cut`), write each
                 as Python (`tracing.emit`): `graph_engine`
    functional   torch.func.vjp at every forward (`at_run_time`)
    eager        the tape of autograd, one per forward (`at_run_time`)
"""

from typing import TYPE_CHECKING

from ppfunc._lazy import attach

if TYPE_CHECKING:
    from .at_run_time import eager as eager, functional as functional
    from .graph_engine import graph as graph
else:
    __getattr__, __dir__, __all__ = attach(
        __name__, {"at_run_time": "eager functional", "graph_engine": "graph"}
    )
