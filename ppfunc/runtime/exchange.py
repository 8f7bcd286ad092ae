"""Exchange the signatures of edges between processes: once per form of the batch, then remembered."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ppfunc.schedule import Schedule
from ppfunc.stage import Signature

from .transport import ControlTransport

Edges = dict[tuple[int, int], tuple[Signature, ...]]  # by (source, destination), the signature of every microbatch


class Negotiation:
    """Passes signatures from process to process, and remembers them.

    Args:
        schedule: says which rank has which stage.
        control: carries the texts.
    """

    def __init__(self, schedule: Schedule, control: ControlTransport) -> None:
        self.schedule, self.control = schedule, control
        self.agreed: Edges = {}
        self._early: Edges = {}

    def send(self, edge: tuple[int, int], signatures: Sequence[Signature]) -> None:
        self.agreed[edge] = tuple(signatures)
        source, destination = (self.schedule.placement[stage] for stage in edge)
        self.control.send_text(source, destination, _write(edge, signatures))

    def recv(self, edge: tuple[int, int]) -> Sequence[Signature]:
        source, destination = (self.schedule.placement[stage] for stage in edge)
        while edge not in self._early:  # a rank tells of its edges in the order in which its own stages come
            other, signatures = _read(self.control.recv_text(destination, source))
            self._early[other] = signatures
        self.agreed[edge] = self._early.pop(edge)
        return self.agreed[edge]


class Replay:
    """Gives the signatures that were agreed before; raises where this process would now tell others.

    Args:
        agreed: of an earlier negotiation.
    """

    def __init__(self, agreed: Edges) -> None:
        self.agreed = agreed

    def send(self, edge: tuple[int, int], signatures: Sequence[Signature]) -> None:
        if tuple(signatures) != self.agreed[edge]:
            now, before = (" and ".join(map(str, dict.fromkeys(s))) for s in (signatures, self.agreed[edge]))
            raise ValueError(
                f"stage {edge[0]} now gives {now} to stage {edge[1]}, the ranks agreed on {before}; what a stage gives may change "
                f"only with the shapes of the batch: make a new step function for parameters of other dtypes or shapes"
            )

    def recv(self, edge: tuple[int, int]) -> Sequence[Signature]:
        return self.agreed[edge]


def _write(edge: tuple[int, int], signatures: Sequence[Signature]) -> str:
    """One signature per microbatch of an edge, each distinct one written once."""
    index = {signature: n for n, signature in enumerate(dict.fromkeys(signatures))}
    return json.dumps({"edge": edge, "signatures": [s.to_json() for s in index], "microbatches": [index[s] for s in signatures]})


def _read(text: str) -> tuple[tuple[int, int], tuple[Signature, ...]]:
    table = json.loads(text)
    distinct = [Signature.from_json(s) for s in table["signatures"]]
    source, destination = table["edge"]
    return (source, destination), tuple(distinct[n] for n in table["microbatches"])
