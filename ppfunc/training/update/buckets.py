"""Lay leaves out in flat buffers, whole or cut over ranks, and add gradients up in them."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from ppfunc.runtime.ports.protocols import Collective, Wait
from ppfunc.runtime.values.buffers import Leaves, Numbers, Owner
from ppfunc.stage.signature import LeafSignature, differentiable

from ..optim._torch import add_into_each, copy_into_each, users_of

# Bytes of a bucket. Of several, each has half of that at least, unless its leaves are larger.
MOST = 25 * 2**20
_ALIGNED = 64  # bytes: the begin of a leaf

Dims = tuple[int | None, ...]
"""Dimension of every leaf that is cut; None for leaves of which each rank has the whole."""


class LeafPlace(NamedTuple):
    """Place a leaf in a bucket.

    Args:
        leaf: the number of the leaf in its tree.
        offset: the place of its first element, in elements of the bucket.
        shape: the shape of the leaf.
    """

    leaf: int
    offset: int
    shape: tuple[int, ...]


class Bucket(NamedTuple):
    """Describe the layout of a flat buffer of one dtype.

    Args:
        dtype: the dtype of all leaves.
        numel: elements, gaps between leaves counted.
        places: the places of its leaves.
    """

    dtype: torch.dtype
    numel: int
    places: tuple[LeafPlace, ...]


def plan_buckets(
    leaves: Sequence[torch.Tensor | LeafSignature],
    *,
    chosen: Iterable[int] | None = None,
    most: int = MOST,
) -> tuple[Bucket, ...]:
    """Lay leaves out, in their order, in as few buckets of about equal size as ``most`` allows.

    Each bucket has one dtype.

    Args:
        leaves: tensors or their signatures. Those that are neither floating nor complex are left out.
        chosen: numbers of the leaves to lay out; by default all.
        most: bytes of a bucket. A larger leaf has one for itself.

    >>> [bucket.numel for bucket in plan_buckets([torch.zeros(3), torch.zeros(2, 8), torch.zeros(())])]
    [48]
    """
    numbers = range(len(leaves)) if chosen is None else sorted(chosen)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for n in numbers:
        if differentiable(leaves[n].dtype):
            by_dtype.setdefault(leaves[n].dtype, []).append(n)
    return tuple(b for dtype, alike in by_dtype.items() for b in _laid_out(leaves, alike, dtype, most))


def _laid_out(
    leaves: Sequence[torch.Tensor | LeafSignature],
    numbers: Sequence[int],
    dtype: torch.dtype,
    most: int,
) -> Iterable[Bucket]:
    step = max(1, _ALIGNED // dtype.itemsize)
    room = {n: -(-math.prod(leaves[n].shape) // step) * step for n in numbers}
    limit = most // dtype.itemsize
    even = sum(room.values()) / max(1, math.ceil(sum(room.values()) / max(1, limit)))
    places: list[LeafPlace] = []
    used = 0
    for n in numbers:
        if places and (used >= even or used + room[n] > limit):
            yield Bucket(dtype, used, tuple(places))
            places, used = [], 0
        places.append(LeafPlace(n, used, tuple(leaves[n].shape)))
        used += room[n]
    if places:
        yield Bucket(dtype, used, tuple(places))


def views(bucket: Bucket, flat: torch.Tensor) -> list[torch.Tensor]:
    """View the leaves in a buffer: tensors that share its memory.

    Args:
        flat: dtype[numel] of the bucket.
    """
    return [flat[p.offset : p.offset + math.prod(p.shape)].view(p.shape) for p in bucket.places]


class Sums(NamedTuple):
    """Name the ranks over which the gradient of a parameter is summed.

    Args:
        ranks: all these ranks, which hold the same values of it when it is whole.
        parts: the ranks over which it may be cut.
        copies: the ranks that get the same part.
    """

    ranks: Collective
    parts: Collective
    copies: Collective


def shard_dim(shape: Sequence[int], ranks: int, taken: Collection[int] = ()) -> int | None:
    """Find the first dimension that no other axis cuts and that divides by the number of ranks, if any.

    Args:
        shape: the shape of the whole leaf, or of the shard of it that another axis leaves.
        ranks: the number of ranks of the axis.
        taken: the dimensions that other axes cut.

    >>> shard_dim((3, 4), 2), shard_dim((4, 4), 2, taken={0}), shard_dim((1,), 2), shard_dim((), 2)
    (1, 1, None, None)
    """
    if ranks < 2:
        return None
    return next((d for d, size in enumerate(shape) if d not in taken and size and size % ranks == 0), None)


def shard(leaves: Sequence[torch.Tensor], dims: Dims, ranks: int, rank: int) -> tuple[torch.Tensor, ...]:
    """Cut leaves that this rank has whole: shards in new memory; leaves that are not cut as they are."""
    return tuple(
        leaf
        if dim is None
        else leaf.tensor_split(ranks, dim)[rank].clone(memory_format=torch.contiguous_format)
        for leaf, dim in zip(leaves, dims, strict=True)
    )


@torch.no_grad()
def gather(
    shards: Sequence[torch.Tensor], dims: Dims, ranks: Collective, *, most: int = MOST
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Begin to gather whole leaves from the shards of all ranks, as :func:`shard` cuts them.

    Returns:
        A function to call once. It waits, and returns the whole leaves in new memory. Leaves that are not cut
        are returned as they are.
    """
    whole = [s.detach() if s.requires_grad else s for s in shards]
    cut = [n for n, dim in enumerate(dims) if dim is not None]
    if not cut:
        return lambda: tuple(whole)
    begun = []
    for bucket in plan_buckets(whole, chosen=cut, most=most // ranks.size):
        first = whole[bucket.places[0].leaf]
        if len(bucket.places) == 1 and first.numel() == bucket.numel:
            part = first.reshape(-1)
        else:
            part = torch.empty(bucket.numel, dtype=bucket.dtype, device=first.device)
            copy_into_each(views(bucket, part), [whole[place.leaf] for place in bucket.places])
        begun.append((bucket, *ranks.all_gather(part)))

    @torch.no_grad()
    def gathered() -> tuple[torch.Tensor, ...]:
        while begun:
            bucket, flat, wait = begun.pop(0)
            wait()
            numbers = [place.leaf for place in bucket.places]
            shapes = [whole_shape(whole[n].shape, dims[n], ranks.size) for n in numbers]
            if len(shapes) == 1 and flat.numel() == math.prod(shapes[0]) and dims[numbers[0]] == 0:
                whole[numbers[0]] = flat.view(shapes[0])
                continue
            for n, shape in zip(numbers, shapes, strict=True):
                whole[n] = whole[n].new_empty(shape)
            into = [by_rank(whole[n], dims[n], ranks.size) for n in numbers]
            copy_into_each(into, views_by_rank(bucket, flat, dims, ranks.size))
        return tuple(whole)

    return gathered


def whole_shape(shape: Sequence[int], dim: int | None, ranks: int) -> tuple[int, ...]:
    """Return the shape of the whole tensor, of which each rank holds an equal part of this shape."""
    return tuple(size * ranks if d == dim else size for d, size in enumerate(shape))


def by_rank(leaf: torch.Tensor, dim: int | None, ranks: int) -> torch.Tensor:
    """View a whole leaf with two dimensions in the place of ``dim``: ranks, and the rows of each."""
    assert dim is not None
    return leaf.unflatten(dim, (ranks, leaf.shape[dim] // ranks))


def views_by_rank(bucket: Bucket, flat: torch.Tensor, dims: Dims, ranks: int) -> list[torch.Tensor]:
    """View the whole leaves, as of :func:`by_rank`, in a buffer that holds the shards rank after rank."""
    rows, leaves = flat.view(ranks, bucket.numel), []
    for place in bucket.places:
        dim = dims[place.leaf]
        assert dim is not None
        shards = rows[:, place.offset : place.offset + math.prod(place.shape)]
        leaves.append(shards.view(ranks, *place.shape).movedim(0, dim))
    return leaves


class _Memory(NamedTuple):
    """Hold the memory of a bucket.

    Args:
        flat: the buffer in which microbatches are added up.
        sent: the buffer that is added up over ranks: ``flat``, or its values in another dtype.
        total: the sum over ranks: ``sent``, or this rank's part of it.
        leaves, totals: views of ``flat`` and ``total``.
        over: the ranks of the sum.
    """

    flat: torch.Tensor
    sent: torch.Tensor
    total: torch.Tensor
    leaves: list[torch.Tensor]
    totals: list[torch.Tensor]
    over: Sums


class Reducer:
    """Adds up the gradients of a stage in buckets, over microbatches and then over ranks.

    Equivalent to, for each leaf::

        total = sum(gradients of the microbatches)
        total = sum(total of each rank)
        total = this rank's part of total, where a dimension is cut

    It owns its buckets and reuses them in every step: the next ``add`` overwrites the results of ``wait``.

    Args:
        leaves: signatures of the gradients as they are added up over microbatches; floating or complex.
        dims: the dimension of every leaf of which each rank gets a part of the sum; None where it gets the
            whole.
        over: the ranks over which the gradient of every leaf is added up.
        fixed: leaves that are not added up.
        dtype: the dtype in which real gradients are added up over ranks; by default the leaf's own.
        device: the device of the buckets.
        most: bytes of a bucket.
    """

    def __init__(
        self, leaves: Sequence[LeafSignature], dims: Dims, over: Sequence[Sums],
        fixed: Collection[int] = (), *,
        dtype: torch.dtype | None = None, device: torch.device | str | None = None, most: int = MOST,
    ) -> None:  # fmt: skip
        self.form = tuple(leaves), dims, tuple(over), fixed
        leaves = [replace(leaf, shape=(0,)) if n in fixed else leaf for n, leaf in enumerate(leaves)]
        dims = tuple(None if n in fixed else dim for n, dim in enumerate(dims))
        sizes = [sums.parts.size for sums in over]
        shards = [
            LeafSignature(
                tuple(n // ranks if d == dim else n for d, n in enumerate(leaf.shape)), leaf.dtype, False
            )
            for leaf, dim, ranks in zip(leaves, dims, sizes, strict=True)
        ]
        alike: dict[tuple[bool, Sums], list[int]] = {}
        for n, dim in enumerate(dims):
            alike.setdefault((dim is not None, over[n]), []).append(n)
        self._memory, order = [], dict[int, int]()
        for (cut, sums), chosen in sorted(alike.items(), key=lambda item: item[0][0]):
            for bucket in plan_buckets(shards, chosen=chosen, most=most // sums.parts.size if cut else most):
                self._memory.append(_memory(bucket, dims, sums, dtype, device))
                order |= {place.leaf: len(order) + k for k, place in enumerate(bucket.places)}
        self._views, self._totals = (
            tuple(column[order[n]] for n in range(len(leaves)))
            for column in (
                [t for m in self._memory for t in m.leaves],
                [t for m in self._memory for t in m.totals],
            )
        )
        self._dims, self._sizes, self._fixed = dims, sizes, frozenset(fixed)
        added = (dim is None and n not in fixed for n, dim in enumerate(dims))  # as they come
        self._whole = tuple(v if whole else None for v, whole in zip(self._views, added, strict=True))
        # The leaves of which the buckets hold gradients of this step, as they came together.
        self._begun = set[Numbers]()
        self._sums: Leaves = ()
        self._waits: list[Wait] | None = None  # of the sum over ranks that is under way
        self._storages = [t.untyped_storage() for m in self._memory for t in (m.flat, m.sent, m.total)]
        self._users = list(map(users_of, self._storages))

    @property
    def idle(self) -> bool:
        """Tell whether nobody else holds its memory: an optimizer may have kept a gradient."""
        return self._waits is None and list(map(users_of, self._storages)) == self._users

    @torch.no_grad()
    def add(self, gradients: Leaves, numbers: Numbers, microbatch: int, fresh: bool = False) -> None:
        """Add gradients of one microbatch, of the leaves of these numbers; the first of a step are copied."""
        assert self._waits is None  # of the sum over ranks, which a schedule places behind
        if self._fixed.intersection(numbers):
            pairs = [(g, n) for g, n in zip(gradients, numbers, strict=True) if n not in self._fixed]
            gradients, numbers = tuple(g for g, _ in pairs), tuple(n for _, n in pairs)
        if not numbers:
            return
        begun = numbers in self._begun
        if not begun and not self._missing.issuperset(numbers):  # some have come in other parts
            self._zero()
            begun = True
        into = [self._views[n] for n in numbers]
        shaped = [
            g if (dim := self._dims[n]) is None else by_rank(g, dim, self._sizes[n])
            for n, g in zip(numbers, gradients, strict=True)
        ]
        (add_into_each if begun else copy_into_each)(into, shaped)
        self._begun.add(numbers)

    def totals(self) -> tuple[torch.Tensor | None, ...] | None:
        return None if self._waits is not None or self._missing else self._whole

    def put_back(self, gradients: Leaves) -> None:
        """Replace the sums that ``take`` gave by the sums over all places of the leaves.

        ``launch`` copies them, not this: what ``take`` gave may still be on its way to other places.
        """
        self._sums = gradients

    def signature(self, leaf: LeafSignature) -> LeafSignature:
        return leaf

    def take(self, like: Leaves, owned: Owner) -> Leaves:
        """Return the sums over microbatches, in the memory of the buckets; the next ``launch`` ends them."""
        self._zero()
        pairs = zip(self._views, self._dims, strict=True)
        return tuple(view.detach() if dim is None else view.flatten(dim, dim + 1) for view, dim in pairs)

    def launch(self) -> None:
        """Begin to add up over ranks, bucket after bucket; returns at once. All ranks launch in one order."""
        if self._sums:
            sums, self._sums = self._sums, ()
            self._begun.clear()
            self.add(sums, tuple(range(len(sums))), -1)
        self._zero()
        self._waits = []
        for memory in self._memory:
            if memory.sent is not memory.flat:
                memory.sent.copy_(memory.flat)
            if memory.total is memory.sent:
                self._waits.append(memory.over.ranks.all_reduce(memory.sent))
            else:
                wait = memory.over.parts.reduce_scatter(memory.sent, memory.total)
                alone = memory.over.copies.size == 1
                self._waits.append(wait if alone else partial(_add_copies, memory, wait))

    def wait(self) -> Leaves:
        """Wait for the sums over ranks.

        Returns:
            One per leaf, or this rank's part of it, in the dtype in which they were added up.
        """
        assert self._waits is not None
        for wait in self._waits:
            wait()
        self._waits = None
        self._begun.clear()
        # New tensors, so that ``idle`` sees who keeps one.
        return tuple(map(torch.Tensor.detach, self._totals))

    @property
    def _missing(self) -> set[int]:
        """Return the leaves of which no gradient has come in this step."""
        return set(range(len(self._views))).difference(*self._begun)

    def _zero(self) -> None:
        """Make the missing leaves zero, as if a gradient of each had come."""
        missing = tuple(self._missing)
        for n in missing:
            self._views[n].zero_()
        self._begun.add(missing)


def _add_copies(memory: _Memory, wait: Wait) -> None:
    """Wait for this rank's part of a sum, then add up the ranks that have the same part."""
    wait()
    memory.over.copies.all_reduce(memory.total)()


def _memory(
    bucket: Bucket, dims: Dims, over: Sums, dtype: torch.dtype | None, device: torch.device | str | None
) -> _Memory:
    """Make the memory of a bucket; complex leaves stay in their dtype."""
    cut, ranks = dims[bucket.places[0].leaf] is not None, over.parts.size
    wire = bucket.dtype if dtype is None or bucket.dtype.is_complex else dtype
    flat = torch.zeros(bucket.numel * ranks if cut else bucket.numel, dtype=bucket.dtype, device=device)
    sent = flat if wire == bucket.dtype else torch.empty_like(flat, dtype=wire)
    total = sent.new_empty(bucket.numel) if cut else sent
    leaves = views_by_rank(bucket, flat, dims, ranks) if cut else views(bucket, flat)
    return _Memory(flat, sent, total, leaves, views(bucket, total), over)
