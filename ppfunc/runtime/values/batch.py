"""Hold microbatches, mark parts of a batch, refuse batches that cannot be cut, and describe their shapes."""

import json
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from itertools import chain, islice
from typing import Any, NamedTuple, Self

import optree
import torch

from ppfunc._checks import naming_arguments, require_type
from ppfunc.stage import Signature
from ppfunc.stage._torch import register_pytree_node
from ppfunc.stage.constants import MaskParts
from ppfunc.stage.layout import distributed, layout_of, local
from ppfunc.stage.tree import NAMESPACE, tree_leaves, tree_map

Leaves = tuple[torch.Tensor, ...]

_WHOLE = "what every microbatch takes whole is ppfunc.replicated(x)"


@dataclass(frozen=True, slots=True, eq=False)
class Replicated:
    """Mark a part of a batch that every microbatch takes whole; see :func:`replicated`."""

    tree: Any


register_pytree_node(Replicated, lambda marked: ([marked.tree], None), lambda trees, _: Replicated(*trees))


def replicated(tree: Any) -> Replicated:
    """Mark a part of a batch without the batch's rows, such as a table: every microbatch takes it whole.

    Stages see the tree itself. Its gradient, where gradients of the inputs are wanted, is the sum over the
    microbatches.

    Args:
        tree: a tensor, of any shape, or a tree of tensors.

    >>> from ppfunc.runtime import microbatch
    >>> x, table = torch.zeros(4, 2), torch.ones(3, 2)
    >>> [(part.shape[0], whole.shape[0]) for part, whole in microbatch((x, replicated(table)), 2)]
    [(2, 3), (2, 3)]
    """
    return Replicated(tree)


def without_marks(tree: Any) -> tuple[Any, tuple[bool, ...] | None]:
    """Take the marks out of a batch. Tell which leaves every microbatch takes whole; None if none is."""
    parts, treedef = optree.tree_flatten(tree, is_leaf=_is_marked, namespace=NAMESPACE)
    if not any(map(_is_marked, parts)):
        return tree, None
    plain = tree
    if any(isinstance(part, Replicated) for part in parts):
        plain = treedef.unflatten(part.tree if isinstance(part, Replicated) else part for part in parts)
    wholes = [
        part.wholes
        if isinstance(part, MaskParts)
        else [isinstance(part, Replicated)] * len(tree_leaves(part))
        for part in parts
    ]
    return plain, tuple(chain.from_iterable(wholes))


def _is_marked(value: Any) -> bool:
    return isinstance(value, Replicated | MaskParts)


@naming_arguments
class Microbatches:
    """Holds the microbatches of one batch: trees of tensors, which may differ in structure and shape.

    It is a sequence, and a node of torch's pytrees. :func:`ppfunc.microbatch` makes one from a batch. A
    step whose inputs are Microbatches returns their gradients and its outputs as Microbatches.

    Args:
        trees: trees of tensors, one per microbatch, in order.

    >>> [x.shape[0] for x in Microbatches([torch.zeros(3, 2), torch.zeros(1, 2)])]
    [3, 1]
    """

    __slots__ = ("trees",)

    def __init__(self, trees: Iterable[Any]) -> None:
        require_type(
            "trees", trees, Iterable, "a tree for each microbatch; ppfunc.microbatch(batch, m) cuts one"
        )
        self.trees = tuple(trees)

    @classmethod
    def from_iterator(cls, iterator: Iterator[Any], microbatches: int) -> "Microbatches":
        """Take the next microbatches of an iterator, such as ``iter(loader)``, made once for an epoch.

        Raises:
            TypeError: no iterator; one that is made in every step would begin anew.
            ValueError: it has fewer left.

        >>> loader = iter([(torch.zeros(3, 2), torch.zeros(3)), (torch.zeros(1, 2), torch.zeros(1))])
        >>> inputs, targets = Microbatches.from_iterator(loader, 2).unzip()
        >>> [len(x) for x in inputs]
        [3, 1]
        """
        if not isinstance(iterator, Iterator):
            raise TypeError(
                f"iterator: got {reprlib.repr(iterator)} of type {type(iterator).__name__}, expected an"
                " iterator; make it once, before the steps, by iter(...)"
            )
        trees = list(islice(iterator, microbatches))
        if len(trees) < microbatches:
            raise ValueError(
                f"iterator: got {len(trees)} microbatches, expected {microbatches}: it has ended; make"
                " another one for the next epoch, or give the rest to a schedule of so many microbatches"
            )
        return cls(trees)

    def unzip(self) -> tuple["Microbatches", ...]:
        """Take apart microbatches of tuples, such as ``(inputs, targets)``: Microbatches of each item."""
        return tuple(map(Microbatches, zip(*self.trees, strict=True)))

    def __len__(self) -> int:
        return len(self.trees)

    def __getitem__(self, index: int) -> Any:
        return self.trees[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.trees)

    def __repr__(self) -> str:
        try:
            forms = list(dict.fromkeys(str(Signature.of(tree)) for tree in self.trees))
        except (TypeError, ValueError):  # trees whose leaves are not tensors
            forms = list(map(reprlib.repr, self.trees[:2]))
        shown = " and ".join([*forms[:2], *(["others"] if len(forms) > 2 else [])])
        shown = shown if len(shown) < 200 else f"{shown[:200]}..."
        return f"Microbatches({len(self.trees)} of {shown})" if self.trees else "Microbatches([])"

    def map(self, function: Callable[[Any], Any]) -> "Microbatches":
        """Apply a function to each microbatch."""
        return Microbatches(map(function, self.trees))

    def join(self) -> Any:
        """Concatenate the microbatches along axis 0 into one tree, which undoes :func:`ppfunc.microbatch`.

        >>> from ppfunc.runtime import microbatch
        >>> microbatch(torch.arange(4), 2).join()
        tensor([0, 1, 2, 3])
        """
        return tree_map(joined, *self.trees)

    def stack(self) -> Any:
        """Stack the microbatches along a new axis 0 into one tree, ``[m, ...]``."""
        return tree_map(_stacked, *self.trees)


def joined(*leaves: torch.Tensor) -> torch.Tensor:
    """Concatenate along axis 0. Each rank concatenates its own parts of DTensors."""
    layout, rows = layout_of(leaves[0]), sum(leaf.shape[0] for leaf in leaves)
    return distributed(
        torch.cat([*map(local, leaves)]), layout and replace(layout, shape=(rows, *layout.shape[1:]))
    )


def _stacked(*leaves: torch.Tensor) -> torch.Tensor:
    layout = layout_of(leaves[0])
    return distributed(torch.stack([*map(local, leaves)]), layout and layout.stacked(len(leaves)))


register_pytree_node(
    Microbatches, lambda batch: (list(batch.trees), None), lambda trees, _: Microbatches(trees)
)


def refuse_microbatches(treedef: optree.PyTreeSpec, name: str) -> None:
    """Raise TypeError for Microbatches within a tree, whose rows would be cut again."""
    nodes = [treedef]
    while nodes:  # not by recursion: trees may be as deep as optree allows
        node = nodes.pop()
        if node.type is Microbatches:
            raise TypeError(
                f"{name}: got Microbatches within a tree; expected Microbatches of trees: Microbatches([tree,"
                " tree, ...])"
            )
        nodes += node.children()


def require_divisible(
    leaves: Sequence[torch.Tensor],
    paths: Sequence[str],
    microbatches: int,
    name: str,
    whole: Sequence[bool] | None = None,
) -> None:
    """Raise ValueError for a leaf that is not ``whole``, and cannot be cut along axis 0."""
    if whole is not None:
        cut_leaves = [n for n, of_each in enumerate(whole) if not of_each]
        paths, leaves = [paths[n] for n in cut_leaves], [leaves[n] for n in cut_leaves]
    sizes = [leaf.shape[0] if leaf.ndim else None for leaf in leaves]
    for path, leaf, size in zip(paths, leaves, sizes, strict=True):
        if size is None:
            raise ValueError(
                f"{name}{path}: got a scalar, expected a leading batch axis to cut into {microbatches}"
                f" microbatches; {_WHOLE}"
            )
        if size < microbatches or size % microbatches:
            divisors = (k for k in range(1, size + 1) if size % k == 0)
            near = sorted(sorted(divisors, key=lambda k: abs(k - microbatches))[:2])
            raise ValueError(
                f"{name}{path}: got {size} rows in shape {tuple(leaf.shape)}, which {microbatches}"
                f" microbatches do not divide; the nearest that do are"
                f" {' and '.join(map(str, near)) or 'none'}; parts of any sizes are"
                f" ppfunc.Microbatches([...]), with loss_weights=[...]; {_WHOLE}"
            )
    if len(set(sizes)) > 1:
        listed = ", ".join(f"{name}{path}: {size}" for path, size in zip(paths, sizes, strict=True))
        raise ValueError(
            f"the leaves of a batch must have the same number of rows in axis 0, got {listed}; {_WHOLE},"
            " and microbatches of any form are ppfunc.Microbatches([...])"
        )


# -- shapes, for ranks that are given no batch


class BatchShapes(NamedTuple):
    """Describe the shapes of a batch to ranks that are not given it; equal for batches of one form.

    Args:
        text: number and shapes of the microbatches, cut short, and a digest of their signatures.
        rows: number of rows of a microbatch of a whole batch; None if the inputs came as Microbatches.
    """

    text: str
    rows: int | None

    @classmethod
    def of(cls, inputs: Sequence[Signature], rows: int | None) -> Self:
        """Describe a batch that this process was given, by the signatures of its microbatches."""
        index = {signature: n for n, signature in enumerate(dict.fromkeys(inputs))}
        shown = ", ".join(map(str, index)).replace(";", ",")
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        bits = digest("\n".join([*(s.to_json() for s in index), *(str(index[s]) for s in inputs)]))
        whole = "as Microbatches" if rows is None else f"with {rows} rows each"
        return cls(f"{len(inputs)} microbatches of {shown} ({bits}) {whole}", rows)


@lru_cache(maxsize=64)
def write_shapes(shapes: BatchShapes, run_before: bool) -> str:
    """Write the shapes of a batch, and whether the ranks have agreed on them before.

    The text is a line for people, then JSON for :func:`read_shapes`.
    """
    return f"{shapes.text}, {'' if run_before else 'not '}run before\n{json.dumps([shapes, run_before])}"


@lru_cache(maxsize=64)
def read_shapes(text: str) -> tuple[BatchShapes, bool]:
    """Read the text of :func:`write_shapes`.

    >>> shapes = BatchShapes("4 microbatches of float32[2,3]", rows=2)
    >>> read_shapes(write_shapes(shapes, True)) == (shapes, True)
    True
    """
    shapes, run_before = json.loads(text.partition("\n")[2])
    return BatchShapes(*shapes), run_before


def digest(text: str) -> str:
    """Return the first 16 hexadecimal digits of a hash."""
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
