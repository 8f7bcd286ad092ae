"""Stages as the interpreter calls them: their programs, where they live, and what goes in and out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ppfunc.stage import FlatProgram, LeafSignature

BATCH = -1  # the "stage" that the batch comes from
Leaves = tuple[torch.Tensor, ...]


class Edge(NamedTuple):
    """Where one part of a stage's input comes from, or where one part of its output goes.

    Args:
        stage: the stage at the other end, -1 for the batch.
        leaves: the signature of what travels.
    """

    stage: int
    leaves: tuple[LeafSignature, ...]

    @property
    def carrying(self) -> tuple[LeafSignature, ...]:
        """The leaves whose gradients travel back."""
        return tuple(leaf for leaf in self.leaves if leaf.grad)


class StageCall(NamedTuple):
    """One stage as called for one microbatch.

    Args:
        program: functions over flat tuples of leaves.
        sources: the edges that make up its input, in the order of the leaves.
        sinks: the edges that make up the first leaves of its output; what follows is kept for the caller.
        weighted: whether its output has a loss, whose cotangent is the weight of the microbatch.
        kept: number of leaves that follow those of the sinks.
        state: number of leaves of the state: the last of its constants, and the last of its output.
        random: whether its forward draws random numbers; None where that is not known.
    """

    program: FlatProgram
    sources: tuple[Edge, ...]
    sinks: tuple[Edge, ...]
    weighted: bool
    kept: int
    state: int
    random: bool | None


class Home(NamedTuple):
    """Where a stage lives.

    Args:
        device: of its parameters and of everything that it computes.
        params: the signature of its parameters; the leaves with ``grad`` get gradients.
    """

    device: torch.device
    params: tuple[LeafSignature, ...]

    def differentiated(self, leaves: Leaves) -> Leaves:
        """Those of the parameter leaves that get gradients."""
        return tuple(t for t, leaf in zip(leaves, self.params, strict=True) if leaf.grad)


def places(edges: tuple[Edge, ...], carrying: bool = False) -> Iterator[tuple[Edge, slice]]:
    """Each edge with the place of its leaves in the tuple of all of them."""
    start = 0
    for edge in edges:
        stop = start + len(edge.carrying if carrying else edge.leaves)
        yield edge, slice(start, stop)
        start = stop
