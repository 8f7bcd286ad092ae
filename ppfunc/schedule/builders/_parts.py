"""Share among builders instructions by letter and the check of their arguments."""

from __future__ import annotations

from functools import partial

from ..instruction import Instruction, Op

F, B, I, W = (partial(Instruction, op) for op in (Op.F, Op.B, Op.I, Op.W))  # noqa: E741


def require(name: str, got: object, holds: bool, expected: str, mend: str) -> None:
    """Raise ValueError with the argument's name, value, what was expected and how to mend it."""
    if not holds:
        raise ValueError(f"{name} = {got!r}, expected {expected}: {mend}")


def require_counts(**counts: int) -> None:
    """Raise ValueError, with the argument's name, unless every count is an integer of at least 1."""
    for name, got in counts.items():
        holds = isinstance(got, int) and not isinstance(got, bool) and got >= 1
        require(name, got, holds, "an integer of at least 1", f"pass {name}=1 or more")
