"""Say what the caller of a step wants of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ppfunc.stage import LeafSignature

from .arguments import StepArguments
from .buffers import Buffers
from .gradients import Gradients
from .overlap import Overlapped
from .ties import Tied


class ParameterUpdate(NamedTuple):
    """Carry out REDUCE_GRAD and STEP. All functions read and write ``buffers.update_state``, the caller's own.

    Args:
        begin: before the first pass, ``begin(arguments of every pass)`` gives those that the step runs with.
        sums: ``sums(buffers, stage of the model, {number of the leaf: signature of the sum of its gradients})`` is what gradients
            are added up in; None for memory that is made in every step.
        reduce: at REDUCE_GRAD, ``reduce(buffers, stage of the model, what its gradients were added up in, numbers of the leaves)``.
        join: once in a program, ``join(buffers, weighted losses by stage of the schedule)``: between its last REDUCE_GRAD and its
            first STEP, or in the end.
        step: at STEP, ``step(buffers, stage of the model)``; puts new parameters into ``buffers.params`` for a further pass.
        finish: after the last pass, before the step ends on all ranks, ``finish(buffers)``.
        unshard: at UNSHARD, ``unshard(buffers, stage of the model)`` puts whole parameters into ``buffers.params``, and this rank's
            shards of them into ``buffers.shards``; None where parameters are whole.
        together: whether every STEP comes after ``join``; else each comes where the schedule has it, and ``join`` in the end.
        facts: ``facts(update_state)`` gives two texts of terms, which ranks compare where they meet. All ranks agree on the first. On the
            second agree those that hold the same parameters, for other batches.
        kept: ``kept(update_state)`` gives the parameters by stage of the model, whole or this rank's shards of them, and the numbers of
            the leaves that updates leave as they are: places of shared ones are compared where ranks meet.
        alike: whether all ranks meet anew where one has frozen other parameters, since ranks with other batches hold the same.
    """

    begin: Callable[[Sequence[StepArguments]], Sequence[StepArguments]]
    sums: Callable[[Buffers, int, dict[int, LeafSignature]], Gradients] | None
    reduce: Callable[[Buffers, int, Gradients, Sequence[int]], None]
    join: Callable[[Buffers, dict[int, torch.Tensor]], None]
    step: Callable[[Buffers, int], None]
    finish: Callable[[Buffers], None]
    together: bool
    facts: Callable[[Any], tuple[str, str]]
    kept: Callable[[Any], Mapping[int, tuple[Any, frozenset[int]]]]
    alike: bool = False
    unshard: Callable[[Buffers, int], None] | None = None


class StepSpec(NamedTuple):
    """The results that the caller wants of a step, and how they are formed.

    Args:
        name: of the function that made it, with what changes the program; compared between ranks.
        wants: of ``"loss"``, ``"grads"``, ``"input_grads"``, ``"outputs"``, ``"aux"``.
        per_microbatch: whether the gradients of microbatches are kept apart.
        loss_shape: shape of the loss of one microbatch.
        overlapped: runs the two parts of an ``OVERLAP_F_B``; in turn where there is none.
        tied: the places of tied parameters.
        sum_dtype: of the sums of gradients, where that of a parameter is narrower.
        update: what REDUCE_GRAD and STEP do; they are refused where there is none.
        finite: whether a step fails whose loss or gradients are not finite.
        primal: the key of the parameters proper where a transform has added tangents to them, such as ``"0."``.
    """

    name: str
    wants: frozenset[str]
    per_microbatch: bool = False
    loss_shape: tuple[int, ...] = ()
    overlapped: Overlapped | None = None
    tied: Tied = ()
    sum_dtype: torch.dtype | None = None
    primal: str = ""
    update: ParameterUpdate | None = None
    finite: bool = False
