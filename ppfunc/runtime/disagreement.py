"""Raise AgreementError where ranks have been told different things, and say which."""

from __future__ import annotations

from itertools import zip_longest

from .errors import AgreementError


def require_same_step(mine: str, told: str, rank: int, other: int) -> None:
    """Raise where the step that begins on this rank is not that of another; terms are separated by ``"; "``."""
    if mine != told:
        here, there = _differences(mine, told)
        mend = "make the same calls of the same step functions, with the same schedule and with batches of the same shapes"
        if "steps ended" in here:
            mend = "go on from the same point: load the same checkpoint on every rank, and make a new P2P()"
        raise AgreementError(
            f"the ranks disagree on the step that begins: rank {rank} has {here}, rank {other} has {there}; every rank must {mend}"
        )


def require_same_facts(mine: str, told: str, rank: int, other: int) -> None:
    """Raise where another rank has other facts; terms are separated by ``"; "``."""
    if mine != told:
        here, there = _differences(mine, told)
        raise AgreementError(f"the ranks disagree: rank {rank} has {here}; rank {other} has {there}; every rank must be given the same")


def require_same_modes(training: int, evaluation: int) -> None:
    """Raise where the modules of one rank are in training mode, those of another in evaluation mode; -1 stands for no rank."""
    if training >= 0 and evaluation >= 0:
        raise AgreementError(
            f"the ranks disagree on the mode of their modules: training on rank {training}, evaluation on rank {evaluation}; call train() "
            f"or eval() on every rank (where a stage is frozen on purpose, leave its outermost module in training mode)"
        )


def _differences(one: str, other: str) -> tuple[str, str]:
    """Of two lines, the terms that differ. What follows them is for programs.

    >>> _differences("call 2; f; seed None", "call 3; f; seed (0, 1)")
    ('call 2; seed None', 'call 3; seed (0, 1)')
    """
    terms = (text.partition("\n")[0].split("; ") for text in (one, other))
    pairs = [(a, b) for a, b in zip_longest(*terms, fillvalue="nothing") if a != b]
    return "; ".join(a for a, _ in pairs), "; ".join(b for _, b in pairs)
