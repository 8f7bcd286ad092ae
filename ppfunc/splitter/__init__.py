"""Split any ``torch.nn`` module into stages by the names of its modules.

One call of the model is traced without values (`trace`): its operators are recorded above autograd and autocast
(`record`), each with the stage that hooks on the named modules say. The trace is cut (`cut`): values that later stages
need cross, what is cheap is computed again where it is needed (`effects`). Each part is written as straight-line code
(`emit`, `program`), and kept for every form of the inputs (`source`), which the stage functions (`stages`) look up.
"""

from .split import Split, split

__all__ = ["Split", "split"]
