"""Hold the memory of one call of a compiled step: made for the call, dropped with it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..call.batch import Leaves as Leaves
from .gradients import Gradients

Key = tuple[int, int]  # (stage of the schedule, microbatch)


class Tag(NamedTuple):
    """Name of a message, the same at both ends.

    Args:
        direction: ``"F"`` for activations, ``"B"`` for their gradients, ``"R"`` for sums over replicas.
        source: the stage of the schedule that produces it, -1 for the batch.
        destination: the stage that consumes it.
        microbatch: the microbatch, -1 where it belongs to the whole stage.
    """

    direction: str
    source: int
    destination: int
    microbatch: int


@dataclass(slots=True)
class Buffers:
    """Everything that the calls of a program read and write; two calls of one step share none of it.

    Args:
        params: leaves of the parameters, by stage of the model.
        shards: this rank's parts of parameters that are whole only between UNSHARD and RESHARD, by stage of
            the model.
        bare: the parameters as they were given, in their form; without memory where they are not whole all
            the time.
        extras: leaves that are not differentiated (targets, extras), by (stage, microbatch).
        state: leaves of the state, by stage of the model; each forward takes it and puts the new one there.
        cotangents: cotangent of the loss, which is the weight of the microbatch, by (stage, microbatch).
        values: messages between stages, by tag.
        residuals: what a backward needs of its forward, and a weight gradient of its input gradient, by
            (stage, microbatch).
        kept: outputs that belong to the caller, by (stage, microbatch).
        kept_before: what earlier steps of the same call have kept.
        gradients: sums of the parameter gradients so far, by stage of the schedule.
        seed: ``(seed, step)``, None where the caller gave none.
        weights: of the losses of all microbatches, scalars, by stage of the schedule.
        left_out: the microbatches whose weight is known to be 0, of which no backward runs.
        scale: what the cotangents of the loss are multiplied by, None for 1.
        microbatch_offset: the number of the first microbatch among those of all data ranks.
        update_state: belongs to the caller's update, :class:`ppfunc.runtime.call.spec.ParameterUpdate`.
        pending: messages that the transport has posted and not waited for, by tag; only the transport looks
            into it.
    """

    params: dict[int, Leaves] = field(default_factory=dict)
    shards: dict[int, Leaves] = field(default_factory=dict)
    bare: Mapping[int, Leaves] = field(default_factory=dict)
    extras: dict[Key, Leaves] = field(default_factory=dict)
    state: dict[int, Leaves] = field(default_factory=dict)
    cotangents: dict[Key, Leaves] = field(default_factory=dict)
    values: dict[Tag, Leaves] = field(default_factory=dict)
    residuals: dict[Key, tuple[Any, ...]] = field(default_factory=dict)
    kept: dict[Key, Leaves] = field(default_factory=dict)
    kept_before: list[dict[Key, Leaves]] = field(default_factory=list)
    gradients: dict[int, Gradients] = field(default_factory=dict)
    seed: tuple[int, int] | None = None
    weights: dict[int, Leaves] = field(default_factory=dict)
    left_out: frozenset[int] = frozenset()
    scale: torch.Tensor | None = None
    microbatch_offset: int = 0
    update_state: Any = None
    pending: dict[Tag, Any] = field(default_factory=dict)


def moved(tensors: Leaves, device: torch.device) -> Leaves:
    """Move tensors to a device. Those that come to the host are there on return: nothing on it waits."""
    return tuple([t.to(device, non_blocking=device.type != "cpu") for t in tensors])
