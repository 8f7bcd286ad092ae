"""Define what an optimizer and a transform of gradients are: pairs of pure functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ..runtime.collective import Wait as Wait
from ..stage._torch import versions
from ..stage.signature import differentiable
from ..stage.tree import tree_leaves, tree_map

Tree = Any


class ShardOf(NamedTuple):
    """The place of a leaf in a whole: an axis of ranks cuts it, and each has the rows of its place.

    Args:
        shape: of the whole.
        dim: the dimension that is cut, None where the leaf is the whole.
        ranks: of the axis.
        place: of this rank.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    ranks: int = 1
    place: int = 0


class Update(Protocol):
    """The second function of an :class:`Optimizer`."""

    def __call__(
        self,
        grads: Tree,
        state: Tree,
        params: Tree,
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        parts: Sequence[ShardOf] | None = None,
    ) -> tuple[Tree, Tree]: ...


class UpdateOptions(NamedTuple):
    """The keywords of an :class:`Update` as one value; see :class:`Optimizer`."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    parts: Sequence[ShardOf] | None = None


def updating(run: Callable[[Tree, Tree, Tree, UpdateOptions], tuple[Tree, Tree]]) -> Update:
    """Make an :class:`Update`, which records no autograd graph, of ``run(grads, state, params, options)``."""

    @torch.no_grad()
    def update(
        grads: Tree,
        state: Tree,
        params: Tree,
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        parts: Sequence[ShardOf] | None = None,
    ) -> tuple[Tree, Tree]:
        return run(grads, state, params, UpdateOptions(grad_scale, found_inf, parts))

    update.__qualname__ = run.__qualname__
    return update


class Ranks(Protocol):
    """Collectives among some ranks, all of which call the same, in the same order; each returns at once.

    Args:
        size: how many ranks.
        index: of this rank among them.
    """

    size: int
    index: int

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> Wait:
        """Replace a tensor by the sum, or the largest, of those of all ranks."""

    def reduce_scatter(self, tensor: Tensor, part: Tensor) -> Wait:
        """Write this rank's part of the sum of tensors [size * n] into ``part``, [n]."""

    def all_gather(self, part: Tensor) -> tuple[Tensor, Wait]:
        """The tensors [n] of all ranks one after the other, [size * n]."""


class Transform(NamedTuple):
    """A pair of functions that changes gradients, in the form of optax.

    Args:
        init: ``init(params) -> state``, a tree of tensors.
        update: ``update(grads, state, params=params) -> (updates, state)``.
    """

    init: Callable[[Tree], Tree]
    update: Callable[..., tuple[Tree, Tree]]


class Clip(NamedTuple):
    """Clipping by the norm of all gradients of the model: a :class:`Transform` whose arguments can be read.

    Args:
        init, update: as of a transform.
        max_norm: largest norm that is let through.
        norm_type: p of the norm.
    """

    init: Callable[[Tree], Tree]
    update: Callable[..., tuple[Tree, Tree]]
    max_norm: float
    norm_type: float

    @property
    def text(self) -> str:
        """Its numbers, which ranks that train together compare."""
        return f"clip_by_global_norm({self.max_norm}, {self.norm_type})"


class Optimizer(NamedTuple):
    """A pair of functions; any such pair serves as an optimizer.

    Unlike in optax, ``update`` returns the new parameters, not differences to add to them: torch's fused
    kernels make both in one pass. For the same reason it does not run under ``torch.func.vmap``.

    Args:
        init: ``init(params) -> state``, a tree of tensors in dictionaries, lists and tuples.
        update: ``update(grads, state, params, *, grad_scale=None, found_inf=None, parts=None) -> (params, state)``, where
            ``grads`` has the structure, shapes, dtypes and devices of ``params``. Leaves that are neither floating nor complex are
            returned unchanged. The results carry no autograd graph. ``grad_scale`` float32[] divides the gradients
            first; where ``found_inf`` float32[] is 1, nothing changes, and no value is read by the host to know it. Where the
            leaves are shards, ``parts`` says of what, one per leaf: the fused kernels then give the bits of the whole.
        clipped: the clipping and the optimizer that this is a chain of, None where there is none. Who updates the model
            part by part clips by the norm of all parts, and takes the second alone.
        text: its name and numbers, which ranks that train together compare; the name of ``update`` where it is empty.
    """

    init: Callable[[Tree], Tree]
    update: Update
    clipped: tuple[Clip, Optimizer] | None = None
    text: str = ""


def text_of(thing: Any) -> str:
    """The name and numbers of an optimizer or a transform, as far as they are known."""
    text: str = getattr(thing, "text", "")
    return text or getattr(getattr(thing, "update", thing), "__qualname__", type(thing).__name__)


def accepting_scale(optimizer: Optimizer) -> Optimizer:
    """An optimizer whose update takes ``grad_scale``, ``found_inf`` and ``parts``, made of one that may not.

    It has to work element by element where ``parts`` are given, which it does not see. Equivalent to: divide the
    gradients; update; where ``found_inf`` is 1, take the old parameters and state. One that takes any keyword is given
    ``found_inf`` and ``parts``, and not trusted to look at them.
    """
    if not isinstance(optimizer, Optimizer):
        optimizer = Optimizer(optimizer.init, optimizer.update)
    taken = inspect.signature(optimizer.update).parameters
    if {"grad_scale", "found_inf", "parts"} <= taken.keys():
        return optimizer
    plain: Callable[..., tuple[Tree, Tree]] = optimizer.update
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in taken.values())

    @updating
    def update(grads: Tree, state: Tree, params: Tree, options: UpdateOptions) -> tuple[Tree, Tree]:
        leaves = tree_leaves((params, state)) if options.found_inf is not None else []
        before = versions(leaves)
        known = {name: getattr(options, name) for name in ("found_inf", "parts") if any_keyword or name in taken}
        new = plain(unscaled(grads, options.grad_scale), state, params, **known)
        if versions(leaves) != before:
            raise ValueError(
                "the optimizer has written into its arguments, which are still needed where gradients overflow; take copies, or let "
                "its update take grad_scale, found_inf and parts by name, and change nothing where found_inf is 1"
            )
        return selected(options.found_inf, (params, state), new)

    return optimizer._replace(update=update)


def unscaled(grads: Tree, grad_scale: Tensor | None) -> Tree:
    """Gradients divided by the scale; the same tree where there is none."""
    if grad_scale is None:
        return grads
    return tree_map(lambda g: g / grad_scale.to(g.device, g.dtype) if differentiable(g.dtype) else g, grads)


def selected(found_inf: Tensor | None, old: Tree, new: Tree) -> Tree:
    """``old`` where ``found_inf`` is 1, else ``new``, without reading it."""
    if found_inf is None:
        return new
    return tree_map(lambda a, b: a if a is b else torch.where((found_inf > 0).to(a.device), a, b), old, new)
