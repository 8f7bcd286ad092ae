"""Share among builders instructions by letter and the check of their arguments."""

from __future__ import annotations

from functools import partial

from ...parallel.counts import require_counts as require_counts
from ..instruction import Instruction, Op

F, B, I, W = (partial(Instruction, op) for op in (Op.F, Op.B, Op.I, Op.W))  # noqa: E741


def require(name: str, got: object, holds: bool, expected: str, mend: str) -> None:
    """Raise ValueError with the argument's name, value, what was expected and how to mend it."""
    if not holds:
        raise ValueError(f"{name} = {got!r}, expected {expected}: {mend}")
