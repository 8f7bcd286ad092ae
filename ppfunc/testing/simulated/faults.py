"""Define the faults of a simulation: what goes wrong, on which rank, at which of its operations."""

from typing import NamedTuple

KINDS = ("raise", "interrupt", "kill", "freeze", "delay", "drop")


class InjectedError(RuntimeError):
    """The exception of a fault of kind ``"raise"``."""


class RankStopped(Exception):
    """Ends the thread of a rank that was killed, or froze, once all others have ended."""


class Fault(NamedTuple):
    """Something that goes wrong on one rank, once.

    Args:
        kind: one of:

            * ``"raise"``: the operation raises an :class:`InjectedError`, or the next one that may: none does
              while a failure is published, or once the rank cannot fail the step that ends.
            * ``"interrupt"``: a KeyboardInterrupt.
            * ``"kill"``: the rank stops. Each connection delivers all that it has sent, or nothing; then its
              peers notice.
            * ``"freeze"``: the rank stops for ``seconds``; for ever if they are None.
            * ``"delay"``: the next message that it sends takes ``seconds`` more.
            * ``"drop"``: the next message that it sends never arrives, nor do later ones on its connection.
        rank: where.
        at: the operation, counted from 0 on that rank.
        seconds: of virtual time.
    """

    kind: str
    rank: int
    at: int
    seconds: float | None = None


def require_possible(faults: tuple[Fault, ...], ranks: int) -> None:
    """Raise ValueError for a fault that cannot happen."""
    for fault in faults:
        if fault.kind not in KINDS:
            raise ValueError(f"got a fault of kind {fault.kind!r}, expected one of {', '.join(KINDS)}")
        if not 0 <= fault.rank < ranks or fault.at < 0:
            raise ValueError(f"got {fault}, expected a rank from 0 to {ranks - 1} and an operation from 0 on")
        if (fault.seconds is None) != (fault.kind != "delay") and fault.kind != "freeze":
            raise ValueError(f"got {fault}; seconds go with a delay, and may go with a freeze")
