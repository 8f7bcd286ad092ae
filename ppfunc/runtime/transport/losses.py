"""Sum the losses of a step over its stages, and put together those of every microbatch."""

from collections.abc import Iterable, Mapping, Sequence

import torch

from .protocols import LossPart


def sum_up(losses: Sequence[torch.Tensor], parts: Mapping[int, LossPart]) -> torch.Tensor:
    """Sum the losses of all stages.

    Args:
        losses: of each stage of ``parts``, ascending.

    Returns:
        What :meth:`~ppfunc.runtime.transport.protocols.ControlTransport.end` returns.
    """
    weighted, rows = apart(losses, [part for _, part in sorted(parts.items())])
    total = torch.cat(weighted).sum(0)
    return torch.stack([total, *(rows[m] for m in sorted(rows))]) if rows else total


def apart(
    losses: Iterable[torch.Tensor], parts: Iterable[LossPart]
) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
    """Take apart losses: those that are weighted, by stage; and by microbatch, if the loss of each is wanted,
    those that are not, added up over stages.
    """
    weighted, rows = [], dict[int, torch.Tensor]()
    for loss, part in zip(losses, parts, strict=True):
        weighted.append(loss[0] if part.each else loss)
        for m, row in zip(part.each, loss[1] if part.each else (), strict=True):
            rows[m] = rows[m] + row if m in rows else row
    return weighted, rows


def shape_of_sum(parts: Mapping[int, LossPart]) -> tuple[int, ...]:
    """Return the shape of what :func:`sum_up` returns."""
    part = next(iter(parts.values()))
    microbatches = {m for each in parts.values() for m in each.each}
    return (1 + len(microbatches), *part.leaf.shape[2:]) if part.each else part.leaf.shape[1:]
