"""Let one evaluation and one trace of a stage serve all sizes for which it takes the same path.

Sizes that vary are symbols. What is decided by them is noted, and decided again for other sizes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from .._torch import FakeTensor, expression, shape_env, size_symbol, storage
from ..program import Example
from ..signature import LeafSignature, Signature


class Numbers:
    """Puts numbers in the place of symbols: in values, tensors without values, and what they are nested in.

    Args:
        values: by symbol.
    """

    def __init__(self, values: Mapping[Any, int]) -> None:
        self._values, self._known = values, dict[Any, int]()
        self._storages: dict[int | None, Any] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return getattr(value, "_make", type(value))(map(self, value))
        if isinstance(value, torch.SymInt):
            made = expression(value)
            if made not in self._known:
                self._known[made] = int(made.xreplace(self._values))
            return self._known[made]
        if isinstance(value, dict):
            return {k: self(v) for k, v in value.items()}
        if isinstance(value, Example | Signature | LeafSignature):
            return replace(value, **{f.name: self(getattr(value, f.name)) for f in fields(value)})
        return self._tensor(value) if isinstance(value, FakeTensor) else value

    def _tensor(self, like: FakeTensor) -> FakeTensor:
        """Make a tensor that shares memory with others as ``like`` does with theirs."""
        if like.layout is not torch.strided:
            return like
        memory, bare = like.untyped_storage(), torch.empty(0, dtype=like.dtype, device="meta")
        if (key := storage(like)) not in self._storages:
            self._storages[key] = torch.UntypedStorage(self(memory.nbytes()), device="meta")
        bare.set_(self._storages[key], *self((like.storage_offset(), tuple(like.shape), like.stride())))
        return FakeTensor(like.fake_mode, bare, like.device)


class SizeRange:
    """Holds arguments, some sizes of which are symbols, and what is decided by them when these are used.

    Args:
        before, now: two forms of the same arguments. Sizes vary that differ, or that varied ``before``; those
            that are equal to each other in both stay equal.

    Attributes:
        trees: ``now``, with symbols for the sizes that vary. They decide as the sizes of ``now`` do.
        symbols: all of them.

    >>> eight, nine, two = (Signature.of(torch.empty(n, 4)) for n in (8, 9, 2))
    >>> lengths = SizeRange([eight], [nine])
    >>> rows, numbers = lengths.trees[0].leaves[0].shape[0], lengths.numbers([two])
    >>> numbers((rows * 3, "text")), bool(rows > 5), lengths.numbers([two])
    ((6, 'text'), True, None)
    """

    def __init__(self, before: Sequence[Signature], now: Sequence[Signature]) -> None:
        self._env, self._known = shape_env(), dict[tuple[str, int], Any]()
        leaves = [tuple(map(self._leaf, a.leaves, b.leaves)) for a, b in zip(before, now, strict=True)]
        self.trees = tuple(replace(tree, leaves=each) for tree, each in zip(now, leaves, strict=True))
        self.symbols = [*self._known.values()]
        self._names = [*map(expression, self.symbols)]
        self._decided = -1, "True"  # how often, and the conditions

    def _leaf(self, before: LeafSignature, now: LeafSignature) -> LeafSignature:
        return replace(now, shape=tuple(map(self._size, before.shape, now.shape)))

    def _size(self, before: Any, now: int) -> Any:
        if now < 2 or (isinstance(before, int) and before == now):
            return now  # operators have ways of their own with 0 and 1
        key = str(before), now
        if key not in self._known:
            self._known[key] = size_symbol(self._env, now, f"size{len(self._known)}")
        return self._known[key]

    def numbers(self, trees: Sequence[Signature]) -> Numbers | None:
        """Return the numbers of arguments of the same structure, None where they would decide otherwise."""
        values: dict[int, int] = {}
        for ours, theirs in zip(_sizes(self.trees), _sizes(trees), strict=True):
            expected = ours if isinstance(ours, int) else values.setdefault(id(ours), theirs)
            if expected != theirs:
                return None
        given, decided = [values[id(size)] for size in self.symbols], len(self._env.guards)
        if self._decided[0] != decided:
            text = self._env.produce_guards_expression(self.symbols, ignore_static=False)
            self._decided = decided, text or "True"
        if min(given) < 2 or not self._env.evaluate_guards_expression(self._decided[1], given):
            return None
        return Numbers(dict(zip(self._names, given, strict=True)))


def _sizes(trees: Sequence[Signature]) -> list[Any]:
    return [size for tree in trees for leaf in tree.leaves for size in leaf.shape]
