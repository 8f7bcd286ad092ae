"""Batches: a tree with a leading axis of microbatches, or a list of trees, read as tuples of leaves."""

from __future__ import annotations

from numbers import Integral
from typing import Any, NamedTuple

import optree
import torch

from ppfunc.stage import Signature
from ppfunc.stage.signature import flatten


class Batch(NamedTuple):
    """A batch, read.

    Args:
        leaves: the leaves of every microbatch.
        signatures: the signature of every microbatch; nothing in a batch carries a gradient.
        listed: whether it was given as a list of trees.
    """

    leaves: tuple[tuple[torch.Tensor, ...], ...]
    signatures: tuple[Signature, ...]
    listed: bool = False

    def differentiable(self) -> Batch:
        """The same batch, its floating and complex leaves wanting gradients."""
        distinct = {s: s.with_grad() for s in set(self.signatures)}
        return self._replace(signatures=tuple(distinct[s] for s in self.signatures))


def microbatch(batch: Any, microbatches: int) -> Any:
    """Cut a batch into microbatches: every leaf ``[b, ...]`` becomes ``[m, b/m, ...]``, a view.

    Args:
        batch: a tree of tensors with the same leading axis ``b``; no list, which a step would read as one
            tree per microbatch.
        microbatches: ``m``, at least 1, which must divide ``b``.

    Raises:
        ValueError: ``b`` is smaller than ``m`` or not divisible by it, or leaves disagree on ``b``.
        TypeError: a leaf is not a tensor, ``microbatches`` no integer, or the batch a list.

    >>> microbatch({"x": torch.zeros(6, 2)}, 3)["x"].shape
    torch.Size([3, 2, 2])
    """
    if not isinstance(microbatches, Integral):
        raise TypeError(f"got {type(microbatches).__name__} as the number of microbatches, expected an integer")
    if isinstance(batch, list):
        raise TypeError(
            f"batch: got a list of {len(batch)}, which a step would read as one tree per microbatch; make it a tuple or a dictionary"
        )
    if microbatches < 1:
        raise ValueError(f"got {microbatches} microbatches, expected at least 1")
    leaves, treedef = flatten(batch, "batch")
    paths = [a.codify("") for a in optree.treespec_accessors(treedef)]
    sizes = {path: leaf.shape[0] if leaf.ndim else None for path, leaf in zip(paths, leaves, strict=True)}
    if len(set(sizes.values())) > 1:
        told = ", ".join(f"batch{path}: {'a scalar' if size is None else size}" for path, size in sizes.items())
        raise ValueError(f"the leaves of a batch must have the same leading axis, got {told}")
    for size in set(sizes.values()):
        if size is None:
            raise ValueError("got a scalar, expected tensors with a leading batch axis")
        if size < microbatches:
            mend = f"use at most {size} microbatches" if size else "give it at least one row for each"
            raise ValueError(f"a batch of {size} is smaller than its {microbatches} microbatches; {mend}")
        if size % microbatches:
            fits = [k for k in range(1, size + 1) if size % k == 0]
            near = sorted(sorted(fits, key=lambda k: abs(k - microbatches))[:2])
            raise ValueError(
                f"a batch of {size} is not divisible by {microbatches} microbatches; "
                f"the nearest numbers that divide it are {' and '.join(map(str, near))}"
            )
    cut = [leaf.reshape(microbatches, leaf.shape[0] // microbatches, *leaf.shape[1:]) for leaf in leaves]
    return optree.tree_unflatten(treedef, cut)


def read_batch(batch: Any, microbatches: int, name: str) -> Batch:
    """The microbatches of ``batch``.

    Args:
        batch: a list of ``m`` trees, one per microbatch, or any other tree, every leaf of which
            has a leading axis of ``m``.
        microbatches: ``m``.
        name: how errors call the batch.

    Raises:
        ValueError: another number of microbatches, with what was got and what was expected.
        TypeError: a leaf is not a tensor.
    """
    if isinstance(batch, list):
        if len(batch) != microbatches:
            raise ValueError(
                f"{name}: got a list of {len(batch)} microbatches, the schedule has {microbatches}; a list holds one tree per "
                f"microbatch, a tuple or a dictionary is a tree"
            )
        read = [flatten(tree, f"{name}[{i}]") for i, tree in enumerate(batch)]
        return Batch(
            tuple(tuple(leaves) for leaves, _ in read),
            tuple(Signature.of(tree, f"{name}[{i}]").without_grad() for i, tree in enumerate(batch)),
            listed=True,
        )
    leaves, treedef = flatten(batch, name)
    for accessor, leaf in zip(optree.treespec_accessors(treedef), leaves, strict=True):
        if leaf.ndim == 0 or leaf.shape[0] != microbatches:
            got = "a scalar" if leaf.ndim == 0 else f"a leading axis of {leaf.shape[0]} in shape {tuple(leaf.shape)}"
            raise ValueError(
                f"{name}{accessor.codify('')}: got {got}, the schedule has {microbatches} microbatches; "
                f"cut the batch with ppfunc.microbatch({name}, {microbatches})"
            )
    columns = [leaf.unbind(0) for leaf in leaves]
    rows = tuple(zip(*columns, strict=True)) if columns else ((),) * microbatches
    signature = Signature.of(treedef.unflatten(rows[0])).without_grad()
    return Batch(rows, (signature,) * microbatches)
