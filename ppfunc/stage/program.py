"""Describe stage programs: the pure functions of which forward and backward of one stage consist."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from .abstract.outline import Outline
from .example import Example, Leaves
from .layout import local
from .signature import Signature
from .tree import tree_flatten

Gradients = tuple[torch.Tensor | None, ...]
Stage = Callable[..., Any]
"""``fn(params, x, *extras) -> y``, pure, over trees of tensors; or ``-> Output`` where it returns more than
``y``.
"""
Loss = Callable[[Any, Any], Any]
"""``loss_fn(y, target) -> scalar``, or ``-> (scalar, aux)``, where ``aux`` is a tree of tensors."""


class FlatProgram(NamedTuple):
    """Hold the functions of a stage on flat tuples of tensors; call them under ``torch.no_grad()``.

    Leaves of ``x``, of the extras and of ``gy`` may have any strides; outputs and ``gx`` are
    contiguous, so that a tensor is the same whether it was sent or handed over. Gradients of
    parameters have the strides that their operator gives. What is returned may alias the
    arguments, and parts of it each other: nobody may write into it without owning it.

    A backward drops each residual after its last use. The memory is free at once if the caller
    keeps no reference, as in ``backward.function(slots.pop(key), gy)`` of the graph engine (a call of an
    object keeps its arguments to the end); a caller that keeps one may call again (of the graph engine
    only: the residuals of the other engines serve once).

    Args:
        forward: ``(params, x, extras) -> (outputs, residuals)``: all leaves in order; the outputs
            are the leaves of ``y``, then those of the auxiliary output.
        backward: ``(residuals, gy) -> (gparams, gx)``: ``gy`` has one entry per ``grad=True`` leaf
            of ``y``; ``gparams`` one per floating or complex parameter, ``gx`` one per ``grad=True``
            leaf of ``x``; ``None`` without dependence.
        backward_input: ``(residuals, gy) -> (gx, rest)``.
        backward_weight: ``(rest,) -> gparams``.
    """

    forward: Callable[[Leaves, Leaves, Leaves], tuple[Leaves, tuple[Any, ...]]]
    backward: Callable[[tuple[Any, ...], Leaves], tuple[Gradients, Gradients]]
    backward_input: Callable[[tuple[Any, ...], Leaves], tuple[Gradients, tuple[Any, ...]]]
    backward_weight: Callable[[tuple[Any, ...]], Gradients]


class LossResiduals(tuple[Any, ...]):
    """Residuals of a loss that has an engine of its own, as one of those of its stage.

    No parameters are among them. They are not moved to another device.
    """


class StageProgram(NamedTuple):
    """The functions of a stage on trees, and what is known of them beforehand. Of DTensors, the stage is
    given the part of its rank.

    Equivalent to, for ``y, pull = torch.func.vjp(fn, params, x)``::

        y, residuals = forward(params, x)
        gparams, gx = backward(residuals, gy)       # pull(gy)
        gx, rest = backward_input(residuals, gy)    # the same gx ...
        gparams = backward_weight(rest)             # ... and the same gparams, apart

    Args:
        forward: ``(params, x, *extras) -> (y, residuals)``, or ``((y, aux), residuals)``.
        backward, backward_input, backward_weight: gradients have the structures of ``params`` and ``x``,
            zeros without dependence, or if no gradient is wanted.
        flat: the same on flat tuples, which the interpreter calls.
        y: signature of the output.
        aux: signature of the auxiliary output.
        residual_bytes: bytes of the residuals of one microbatch, each storage counted once and
            parameters not at all; ``None`` where an engine cannot know it.
        random: whether the forward draws random numbers, None where that depends on values; a backward never
            does.
    """

    forward: Callable[..., tuple[Any, tuple[Any, ...]]]
    backward: Callable[[tuple[Any, ...], Any], tuple[Any, Any]]
    backward_input: Callable[[tuple[Any, ...], Any], tuple[Any, tuple[Any, ...]]]
    backward_weight: Callable[[tuple[Any, ...]], Any]
    flat: FlatProgram
    y: Signature
    aux: Signature
    residual_bytes: int | None
    random: bool | None


class Engine(Protocol):
    """Differentiates stages: builds the program of one for an example."""

    def __call__(
        self,
        fn: Callable[..., Any],
        example: tuple[Any, ...],
        *,
        has_aux: bool = False,
        name: str = "the stage",
        device: torch.device | str | None = None,
        outline: Outline | None = None,
    ) -> StageProgram:
        """Build the program of the stage ``fn(params, x, *extras) -> y``.

        Args:
            fn: the stage; with ``has_aux`` it returns ``(y, aux)``.
            example: ``(params, x, *extras)``, trees of tensors or signatures.
            has_aux: whether there is an auxiliary output, which gets no cotangent.
            name: how errors call the stage.
            device: where the stage computes; by default where the first tensor of the example with values is.
            outline: that of the stage, of the same example; given one, the engine does not evaluate the stage
                again.

        Raises:
            StageError: the engine cannot serve the stage; says why, and which one can.
        """
        ...


def stage_program(
    flat: FlatProgram, example: Example, outline: Outline, *, has_aux: bool, residual_bytes: int | None
) -> StageProgram:
    """Make the program on trees of the one on flat tuples."""
    y, aux = outline.y, outline.aux
    params = example.params.with_grad()  # of each that can have one

    fill = partial(_filled, example.device)

    def cotangents(gy: Any) -> Leaves:
        leaves, treedef = tree_flatten(gy)
        if treedef != y.treedef:
            raise ValueError(f"gy: got the structure {treedef}, expected that of y, {y.treedef}")
        return tuple(local(g) for g, leaf in zip(leaves, y.leaves, strict=True) if leaf.grad)

    @torch.no_grad()
    def forward(*arguments: Any) -> tuple[Any, tuple[Any, ...]]:
        if len(arguments) != len(example.names):
            raise TypeError(
                f"got {len(arguments) - 2} arguments after x, expected {len(example.extras)}, as in the"
                " example"
            )
        read = [
            s.require(tree, name)
            for s, tree, name in zip(example.signatures, arguments, example.names, strict=True)
        ]
        outputs, residuals = flat.forward(tuple(p.detach() for p in read[0]), read[1], sum(read[2:], ()))
        cut = len(y.leaves)
        out = y.wrap(outputs[:cut])
        return ((out, aux.wrap(outputs[cut:])) if has_aux else out), residuals

    @torch.no_grad()
    def backward(residuals: tuple[Any, ...], gy: Any) -> tuple[Any, Any]:
        gparams, gx = flat.backward(residuals, cotangents(gy))
        return fill(params, gparams), fill(example.x, gx)

    @torch.no_grad()
    def backward_input(residuals: tuple[Any, ...], gy: Any) -> tuple[Any, tuple[Any, ...]]:
        gx, rest = flat.backward_input(residuals, cotangents(gy))
        return fill(example.x, gx), rest

    @torch.no_grad()
    def backward_weight(rest: tuple[Any, ...]) -> Any:
        return fill(params, flat.backward_weight(rest))

    return StageProgram(
        forward, backward, backward_input, backward_weight, flat, y, aux, residual_bytes, outline.random
    )


def _filled(device: torch.device, signature: Signature, gradients: Gradients) -> Any:
    """Return the tree of gradients, with zeros for leaves without one."""
    wanted = iter(gradients)
    pairs = [(leaf, next(wanted) if leaf.grad else None) for leaf in signature.leaves]
    return signature.wrap(
        torch.zeros(leaf.shape, dtype=leaf.dtype, device=device) if g is None else g for leaf, g in pairs
    )
