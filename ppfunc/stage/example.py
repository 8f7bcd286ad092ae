"""Describe the arguments of a stage without their values: the example that an engine builds a program for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from optree import PyTreeSpec

from .layout import local
from .signature import Signature, flatten
from .tree import tree_leaves, tree_structure

Leaves = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """Describe the arguments of a stage without their values: hashable, a key for programs."""

    params: Signature
    strides: tuple[tuple[int, ...], ...]  # of every parameter, in elements
    x: Signature  # gradients are wanted for its ``grad=True`` leaves
    extras: tuple[Signature, ...]  # which are never differentiated
    device: torch.device  # where the stage computes
    subclasses: tuple[str, ...] = ()  # names of other tensor types than ``Tensor`` and ``Parameter``
    targeted: bool = False  # whether the first extra is the target

    @classmethod
    def of(
        cls, example: tuple[Any, ...], device: torch.device | str | None = None, *, targeted: bool = False
    ) -> Example:
        """Read ``(params, x, *extras)``: signatures, or trees of tensors; of DTensors the parts of this rank.

        The stage computes on ``device``, by default that of the first tensor of the example with values, else
        on the CPU.
        """
        signatures = [
            Signature.of(tree, name)
            for tree, name in zip(example, _names(len(example), targeted), strict=True)
        ]
        tensors = [local(t) for tree in example if not isinstance(tree, Signature) for t in tree_leaves(tree)]
        if isinstance(example[0], Signature):
            strides = tuple(torch.empty(leaf.shape, device="meta").stride() for leaf in signatures[0].leaves)
        else:
            strides = tuple(local(t).stride() for t in tree_leaves(example[0]))
        held = (t.device for t in tensors if not t.is_meta)
        where = torch.device(device) if device is not None else next(held, torch.device("cpu"))
        plain = (torch.Tensor, torch.nn.Parameter)
        others = tuple(sorted({type(t).__name__ for t in tensors if type(t) not in plain}))
        return cls(signatures[0], strides, signatures[1], tuple(signatures[2:]), where, others, targeted)

    @property
    def signatures(self) -> tuple[Signature, ...]:
        return self.params, self.x, *self.extras

    @property
    def differentiated(self) -> tuple[bool, ...]:
        """Tell of each leaf of the parameters and of ``x`` whether its gradient may be wanted."""
        return tuple(leaf.grad for leaf in (*self.params.with_grad().leaves, *self.x.leaves))

    @property
    def names(self) -> tuple[str, ...]:
        """Name the arguments in errors."""
        return _names(2 + len(self.extras), self.targeted)

    @property
    def paths(self) -> list[str]:
        """Return the paths of the leaves of all arguments, such as ``"params['w']"``."""
        return [
            name + path
            for name, signature in zip(self.names, self.signatures, strict=True)
            for path in signature.paths
        ]

    def __str__(self) -> str:
        return ", ".join(
            f"{name} = {_short(str(signature))}"
            for name, signature in zip(self.names, self.signatures, strict=True)
        )

    @property
    def extra_leaves(self) -> tuple[Any, ...]:
        return tuple(leaf for signature in self.extras for leaf in signature.leaves)

    def unflatten(self, leaves: Iterable[Any]) -> tuple[Any, ...]:
        """Return the arguments with these leaves."""
        rest = iter(leaves)
        return tuple(s.unflatten(islice(rest, len(s.leaves))) for s in self.signatures)

    def make(self) -> tuple[Leaves, Leaves, Leaves]:
        """Make distinct tensors without values for the parameters, for ``x`` and for the extras."""
        params = tuple(
            torch.empty_strided(leaf.shape, stride, dtype=leaf.dtype, device=self.device)
            for leaf, stride in zip(self.params.leaves, self.strides, strict=True)
        )
        x, extras = (
            tuple(torch.empty(leaf.shape, dtype=leaf.dtype, device=self.device) for leaf in leaves)
            for leaves in (self.x.leaves, self.extra_leaves)
        )
        return params, x, extras


def _names(arguments: int, targeted: bool) -> tuple[str, ...]:
    target = ["target"] if targeted else []
    return "params", "x", *target, *(f"extra {n}" for n in range(arguments - 2 - targeted))


def _short(text: str, most: int = 600) -> str:
    return text if len(text) <= most else f"{text[: most - 100]} ... {text[-100:]}"


def stand_ins(example: tuple[Any, ...], device: torch.device) -> tuple[Leaves, Leaves, Leaves]:
    """Make zeros for the parameters, for ``x`` and for the extras, of the same types of tensor."""

    def zeros(tree: Any) -> Leaves:
        if isinstance(tree, Signature):
            return tuple(torch.zeros(leaf.shape, dtype=leaf.dtype, device=device) for leaf in tree.leaves)
        return tuple(
            torch.zeros_like(t.detach(), device=device if t.is_meta else None)
            for t in map(local, tree_leaves(tree))
        )

    params, x, *extras = map(zeros, example)
    return params, x, sum(extras, ())


def split_aux(out: Any, has_aux: bool, stage: str) -> tuple[tuple[Any, PyTreeSpec], tuple[Any, PyTreeSpec]]:
    """Flatten what a stage returns into leaves and structure of ``y``, and of ``aux`` (none without it)."""
    if not has_aux:
        return flatten(out, f"{stage} y"), ((), tree_structure(None))
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(
            f"{stage} has an auxiliary output: got {type(out).__name__}, expected the pair (y, aux)"
        )
    return flatten(out[0], f"{stage} y"), flatten(out[1], f"{stage} aux")
