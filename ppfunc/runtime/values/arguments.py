"""Read and check the arguments of a call of a step function, and compare their form with the last call."""

import json
import math
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from itertools import chain, islice, repeat
from numbers import Integral
from operator import add, gt
from types import MappingProxyType
from typing import Any, NamedTuple, ParamSpec, Self

import optree
import torch
from optree import PyTreeSpec

from ppfunc._checks import naming_arguments, require_counts, require_type, shown
from ppfunc.schedule import Schedule
from ppfunc.stage import constants
from ppfunc.stage._torch import (
    guards,
    is_dtensor,
    is_wrapped,
    register_pytree_node,
    transforming,
    values,
    without_transforms,
)
from ppfunc.stage.constants import MaskParts, with_constants, without_constants
from ppfunc.stage.device import accelerates
from ppfunc.stage.errors import warn
from ppfunc.stage.layout import MeshLayout, distributed, layout_of, local, same_layout
from ppfunc.stage.signature import LeafSignature, Signature, flatten
from ppfunc.stage.tree import NAMESPACE, tree_flatten, tree_leaves, tree_map, tree_paths, tree_structure

from .buffers import Leaves, ParameterUpdate

_WHOLE = "what every microbatch takes whole is ppfunc.replicated(x)"


# -- batches


@dataclass(frozen=True, slots=True, eq=False)
class Replicated:
    """Mark a part of a batch that every microbatch takes whole; see :func:`replicated`."""

    tree: Any


register_pytree_node(Replicated, lambda marked: ([marked.tree], None), lambda trees, _: Replicated(*trees))


@naming_arguments
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


class SequenceCut(NamedTuple):
    """Describe the slices that :func:`microbatch` has cut.

    Args:
        rows: number of rows of a sequence, 0 if unknown.
        lengths: tokens of each slice of a sequence, 0 if unknown; empty where no slices were cut.
        axis: axis of the tokens, 0 if unknown.
    """

    rows: int = 0
    lengths: tuple[int, ...] = ()
    axis: int = 0


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

    __slots__ = ("_cut", "trees")

    def __init__(self, trees: Iterable[Any]) -> None:
        require_type(
            "trees", trees, Iterable, "a tree for each microbatch; ppfunc.microbatch(batch, m) cuts one"
        )
        self.trees = tuple(trees)
        self._cut: SequenceCut | None = None

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

    def _as_cut(self, cut: SequenceCut | None) -> "Microbatches":
        """Note how slices were cut."""
        self._cut = cut
        return self

    def unzip(self) -> tuple["Microbatches", ...]:
        """Take apart microbatches of tuples, such as ``(inputs, targets)``: Microbatches of each item."""
        return tuple(Microbatches(trees)._as_cut(self._cut) for trees in zip(*self.trees, strict=True))

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
        return Microbatches(map(function, self.trees))._as_cut(self._cut)

    def join(self, slices: int | None = None, axis: int | None = None) -> Any:
        """Concatenate the microbatches along axis 0 into one tree, which undoes :func:`ppfunc.microbatch`.

        Args:
            slices: number of slices of a sequence, which are concatenated along ``axis`` before. What was cut
                by :func:`ppfunc.microbatch`, and what a step returns, know theirs.
            axis: axis of the tokens. What was cut knows it.

        Raises:
            ValueError: the microbatches do not make up whole sequences; slices without an axis, or an axis
                without slices.

        >>> from ppfunc.runtime import microbatch
        >>> microbatch(torch.arange(4), 2).join()
        tensor([0, 1, 2, 3])
        >>> Microbatches(microbatch(torch.arange(8).view(2, 4), 2, slices=[3, 1])).join(slices=2, axis=1)
        tensor([[0, 1, 2, 3],
                [4, 5, 6, 7]])
        """
        if self._cut and len(self._cut.lengths) > 1:
            slices, axis = slices or len(self._cut.lengths), axis or self._cut.axis or None
        if slices is None and axis is None:
            return tree_map(joined, *self.trees)
        if slices is None or axis is None:
            got, lacks = ("slices", "their axis of tokens, axis=1") if slices else ("an axis", "slices=k")
            raise ValueError(f"join: got {got} alone; give {lacks}, too")
        require_counts(slices=slices, axis=axis)
        if len(self) % slices:
            raise ValueError(f"slices: got {slices}, expected a divisor of the {len(self)} microbatches")
        parts = (self.trees[n : n + slices] for n in range(0, len(self), slices))
        return tree_map(joined, *(tree_map(lambda *leaves: torch.cat(leaves, axis), *part) for part in parts))

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


# -- forms of trees, and guards that compare them


class Form(NamedTuple):
    """Describe a tree by all that a program depends on beside the values, laid out for fast comparison."""

    treedef: PyTreeSpec

    classes: frozenset[type]  # kept alive, since guards know them by their addresses
    guards: Callable[..., bool]
    layouts: tuple[MeshLayout | None, ...] | None  # of the leaves, where there are DTensors


def form_of(leaves: Sequence[torch.Tensor], treedef: PyTreeSpec) -> Form:
    """Return the form of a tree that :func:`flatten` took apart, which keeps no tensor alive."""
    layouts = tuple(map(layout_of, leaves))
    classes = frozenset(map(type, leaves))
    return Form(treedef, classes, guards(leaves), layouts if any(layouts) else None)


def leaves_like(tree: Any, form: Form) -> list[Any] | None:
    """Return the leaves of ``tree``. Return None if it has another structure than this form."""

    leaves, treedef = optree.tree_flatten(tree, namespace=NAMESPACE)  # the classes of the form are known
    return leaves if treedef == form.treedef else None


def same_form(tree: Any, form: Form) -> tuple[torch.Tensor, ...] | None:
    """Return the leaves of ``tree``, of DTensors this rank's parts. Return None if it has another form.



    Compared are structure, order of keys, and of each leaf the class, dtype, device, shape, strides, whether
    it requires a gradient, and dispatch keys, which tell inference mode, transforms and autocast; of a
    DTensor the layout and the mesh. A tree that holds one tensor twice never has the form.
    """
    leaves = leaves_like(tree, form)
    if leaves is None or not has_form(leaves, form):
        return None
    return tuple(leaves if form.layouts is None else map(local, leaves))


def has_form(leaves: Sequence[Any], form: Form) -> bool:
    """Tell whether the leaves of a tree of this structure have this form, see :func:`same_form`."""
    return form.guards(*leaves) and (form.layouts is None or all(map(same_layout, leaves, form.layouts)))


@dataclass(frozen=True, slots=True, eq=False)
class TreeForm:
    """Describe one tree of tensors: all that a program depends on beside the values.

    Args:
        form: guard that compares another tree with it.
        types, strides, devices: types, strides and devices of its leaves; of DTensors, of local tensors.
        signature: signature of the tree, or, of a whole batch, of one microbatch.
        tracked: whether a leaf requires a gradient, and so may have a history.
        rows: number of rows of a microbatch of a whole batch, 0 without leaves; None for other trees.
        whole: flags of the leaves of a batch that every microbatch takes whole; None if no leaf is.
    """

    form: Form
    types: tuple[type, ...]
    strides: tuple[tuple[int, ...], ...]
    devices: tuple[torch.device, ...]
    signature: Signature
    tracked: bool
    rows: int | None
    whole: tuple[bool, ...] | None

    def cut(self, leaves: Leaves, microbatches: int) -> list[Leaves]:
        """Cut the leaves of a whole batch into the leaves of every microbatch, as views."""
        if not leaves:
            return [()] * microbatches
        columns = [
            [leaf] * microbatches if of_each else leaf.chunk(microbatches)
            for leaf, of_each in zip(leaves, self.whole or repeat(False), strict=False)
        ]
        return list(zip(*columns, strict=True))

    @property
    def key(self) -> tuple[Any, ...]:
        """Return a hashable key, equal for equal forms."""
        return self.signature, self.types, self.strides, self.devices, self.whole


class LaidOut(NamedTuple):
    """Describe how the DTensors among the arguments of a step lie over meshes.

    Args:
        leaves: dtype and layout, by the name of the leaf.
        digest: digest of all leaves, equal where they are; empty without DTensors.
    """

    leaves: Mapping[str, str]
    digest: str

    def __str__(self) -> str:
        return "; ".join(f"{name}: {leaf}" for name, leaf in self.leaves.items()) or "no DTensors"


P = ParamSpec("P")

LossWeights = Sequence[float] | torch.Tensor | None
Seed = tuple[int, int] | None


class StepForm(NamedTuple):
    """Describe all arguments of one call, by stage of the model: a program is lowered for one such form.

    Args:
        trees: the form of every tree, by its name.
        key: equal for arguments that run the same program.
        params, state: signatures.
        extents: extent of every leaf of the parameters, from its first element to its last, in bytes.
        devices: device of each stage.
        accelerator: the first of them, None if it is the host.
        inputs, targets: signatures of the microbatches; None if this process was given none.
        rows: number of rows of a microbatch of a whole batch; None if the inputs came as Microbatches.
        extras: signatures of the microbatches.
        carry: signatures of the first carries of sequences, by stage.
        weightless: slices whose losses have no weight, in sequences that have some.
    """

    trees: Mapping[str, TreeForm]
    key: tuple[Any, ...]
    params: Mapping[int, Signature]
    extents: tuple[int, ...]
    devices: Mapping[int, torch.device]
    accelerator: torch.device | None
    inputs: tuple[Signature, ...] | None
    targets: tuple[Signature, ...] | None
    rows: int | None
    extras: Mapping[int, tuple[Signature, ...]]
    state: Mapping[int, Signature]
    carry: Mapping[int, tuple[Signature, ...]] = MappingProxyType({})
    weightless: frozenset[int] = frozenset()

    @property
    def distributed(self) -> bool:
        """Tell whether there are DTensors among the arguments."""
        return any(tree.form.layouts for tree in self.trees.values())

    def leaves(self) -> Iterator[tuple[str, LeafSignature]]:
        """List the leaves of all arguments with their names; of whole batches the leaves of a microbatch."""
        for name, tree in self.trees.items():
            yield from zip((name + path for path in tree.signature.paths), tree.signature.leaves, strict=True)

    def laid_out(self) -> LaidOut:
        """Describe how the arguments lie over meshes."""
        named = self.leaves() if self.distributed else ()
        leaves = {name: f"{leaf.dtype} {leaf.layout}" for name, leaf in named if leaf.layout is not None}
        return LaidOut(leaves, digest(repr(leaves)) if leaves else "")


def read_tree(tree: Any, name: str, microbatches: int) -> tuple[Leaves, TreeForm]:
    """Read the leaves of a tree and its form."""
    marked, (tree, whole) = tree, without_marks(tree)
    leaves, treedef = flatten(tree, name)
    refuse_microbatches(treedef, name)
    if not microbatches and marked is not tree:
        raise TypeError(
            f"{name}: got ppfunc.replicated(x), which is for parts of a whole batch; give x itself"
        )
    for leaf, path in zip(leaves, tree_paths(treedef, name), strict=True) if transforming() else ():
        if is_dtensor(values(leaf)):
            raise ValueError(
                f"{path}: got a DTensor under a torch.func transform, which does not support it; use"
                " ppfunc.jvp or hvp"
            )
    local_leaves = tuple(map(local, leaves))
    signature = Signature(treedef, tuple(map(LeafSignature.of, leaves)))
    rows = None
    if microbatches:
        require_divisible(local_leaves, tree_paths(treedef), microbatches, name, whole)
        signature = signature.cut(microbatches, whole)
        cut_leaves = zip(signature.leaves, whole or repeat(False), strict=False)
        rows = next((leaf.shape[0] for leaf, of_each in cut_leaves if not of_each), 0)
    return local_leaves, TreeForm(
        form_of(leaves, tree_structure(marked)),
        tuple(map(type, leaves)),
        tuple(t.stride() for t in local_leaves),
        tuple(t.device for t in local_leaves),
        signature,
        any(t.requires_grad for t in leaves),
        rows,
        whole if microbatches else None,
    )


@naming_arguments
def microbatch(
    batch: Any, microbatches: int, *, slices: int | Sequence[int] | None = None, axis: int = 1
) -> Microbatches:
    """Cut a batch along axis 0: every leaf ``[m b, ...]`` becomes ``m`` views ``[b, ...]``.

    Of a DTensor, each rank cuts its local tensor. With ``slices`` each of the ``m``, a sequence, is cut along
    another axis too, for a schedule of slices.

    Args:
        batch: a tree of tensors with the same size of axis 0; others are :func:`replicated`.
        microbatches: ``m``, at least 1, which must divide that size.
        slices: number of equal slices of a sequence, or their lengths, such as
            :func:`ppfunc.parallel.slice_lengths` returns; by default none are cut.
        axis: axis of the tokens, along which slices are cut, from 1.

    Raises:
        ValueError: a leaf has no axis 0, or its size is not divisible by ``m``, or leaves disagree on it; or
            ``microbatches`` is not an integer of at least 1; slices that do not make up a leaf.
        TypeError: a leaf is not a tensor, or slices are no integers.

    >>> microbatch({"x": torch.zeros(6, 2)}, 3)[0]["x"].shape
    torch.Size([2, 2])
    >>> [tuple(part.shape) for part in microbatch(torch.zeros(2, 8), 2, slices=[5, 3])]
    [(1, 5), (1, 3), (1, 5), (1, 3)]
    """
    require_counts(microbatches=microbatches)
    if slices is not None:
        if not isinstance(slices, int | list | tuple) or slices in ([], ()):
            raise TypeError(f"slices: got {slices!r}, expected their number, or a list of lengths")
        for number in [slices] if isinstance(slices, int) else slices:
            require_counts(slices=number)
        require_counts(axis=axis)
        if without_marks(with_constants(batch, "batch"))[1] is not None:
            raise ValueError(
                "batch: got ppfunc.replicated(x) or a mask of attention, of which nothing says what a slice"
                " takes; put the parts together yourself, ppfunc.Microbatches([...])"
            )
        cut = [_slices_of(tree, slices, axis) for tree in microbatch(batch, microbatches)]
        return Microbatches(chain.from_iterable(trees for _, trees in cut))._as_cut(cut[0][0])
    leaves, form = read_tree(with_constants(batch, "batch"), "batch", microbatches)
    if axis != 1:
        raise ValueError(f"axis: got {axis} without slices, of which it is the axis; leave it out")
    parts = map(form.signature.wrap, form.cut(leaves, microbatches))
    return Microbatches(map(without_constants, parts))._as_cut(SequenceCut())


def _slices_of(tree: Any, slices: int | Sequence[int], axis: int) -> tuple[SequenceCut | None, Iterator[Any]]:
    """Cut the tensors of a sequence along an axis; each slice takes numbers, texts and flags as they are.

    Returns:
        How the first tensor is cut, and the slices.
    """
    leaves, treedef = tree_flatten(tree)
    columns: list[Sequence[Any]] = []
    first: SequenceCut | None = None
    for path, leaf in zip(tree_paths(treedef, "batch"), leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            columns.append([leaf] * (slices if isinstance(slices, int) else len(slices)))
            continue
        if leaf.ndim <= axis:
            raise ValueError(
                f"{path}: got the shape {tuple(leaf.shape)}, which has no axis {axis} of tokens to cut"
            )
        tokens = leaf.shape[axis]
        equal = isinstance(slices, int) and tokens % slices == 0
        lengths = [tokens // slices] * slices if isinstance(slices, int) and equal else slices
        if isinstance(lengths, int) or sum(lengths) != tokens or not tokens:
            raise ValueError(
                f"{path}: got {tokens} tokens in axis {axis} of the shape {tuple(leaf.shape)}, and slices ="
                f" {slices!r}, expected a divisor of them, or lengths that make them up"
            )
        first = first or SequenceCut(leaf.shape[0], tuple(lengths), axis)
        columns.append(leaf.split(list(lengths), axis))
    return first, map(treedef.unflatten, zip(*columns, strict=True))


def step_form(
    trees: Mapping[str, TreeForm],
    stages: Sequence[int],
    microbatches: int,
    params: Mapping[int, Leaves],
    inputs: Sequence[Leaves],
    known: Mapping[int, torch.device],
    weightless: frozenset[int] = frozenset(),
) -> StepForm:
    """Put together the form of all arguments; ``known`` says where stages compute, before their leaves do."""

    def batch(name: str) -> tuple[Signature, ...] | None:
        if name in trees:
            return (trees[name].signature.without_grad(),) * microbatches
        forms = [trees[f"{name}[{i}]"] for i in range(microbatches) if f"{name}[{i}]" in trees]
        return tuple(form.signature.without_grad() for form in forms) or None

    extras = {s: batch(f"extras[{s}]") for s in stages}
    devices = {s: known.get(s) or _device(params, s, inputs) for s in stages}
    first = next(iter(devices.values()))
    return StepForm(
        trees,
        (*((name, form.key) for name, form in sorted(trees.items())), weightless),
        {s: trees[f"params[{s}]"].signature for s in stages},
        tuple(extent(leaf) for s in stages for leaf in params[s]),
        devices,
        first if accelerates(first) else None,
        batch("inputs"),
        batch("targets"),
        trees["inputs"].rows if "inputs" in trees else None,
        {s: signatures for s, signatures in extras.items() if signatures},
        {s: trees[f"state[{s}]"].signature.without_grad() for s in stages if f"state[{s}]" in trees},
        {s: signatures for s in stages if (signatures := batch(f"carry[{s}]"))},
        weightless,
    )


def require_values(name: str, treedef: PyTreeSpec, devices: Sequence[torch.device]) -> None:
    """Raise ValueError for a leaf without values; of parameters, for leaves on several devices.

    Args:
        name: name of the tree in errors.
        devices: devices of its leaves.
    """
    for path, device in zip(tree_paths(treedef, name), devices, strict=True):
        if device.type == "meta":
            raise ValueError(
                f"{path}: got a tensor on the device meta, which has no values; load or materialise it"
                " (split.load, ppfunc.materialize), or lower the call, .lower(...), for shapes alone"
            )
        if device != devices[0] and name.startswith("params"):
            raise ValueError(
                f"{path}: got a tensor on {device}, others of this stage are on {devices[0]}; move all to one"
                " device"
            )


def _device(params: Mapping[int, Leaves], stage: int, inputs: Sequence[Leaves]) -> torch.device:
    """Choose where a stage computes: with its parameters, else those nearest to it, else the batch."""
    near = sorted(params, key=lambda s: abs(s - stage))
    device = next((params[s][0].device for s in near if params[s]), None)
    if device is None:
        device = next((t.device for row in inputs for t in row), None)
    return torch.get_default_device() if device is None or device.type == "meta" else device


def extent(tensor: torch.Tensor) -> int:
    """Count the bytes from the beginning of the first element of a tensor to the end of the last."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.itemsize * (1 + last) if tensor.numel() else 0


def overlap(addresses: Sequence[int], extents: Sequence[int]) -> bool:
    """Tell whether the memory of tensors may overlap: else each ends before the next begins."""
    return any(map(gt, sorted(map(add, addresses, extents)), sorted(addresses)[1:]))


# -- the arguments of a call


@dataclass(frozen=True, slots=True)
class RawArguments:
    """Hold the arguments of one call as the caller gave them; dictionaries are keyed by stage of the model.

    Args:
        params, inputs, targets, extras, state, loss_weights, seed: see :func:`ppfunc.value_and_grad`.
        microbatch_offset: the number of the first microbatch, on which random numbers depend.
        scale: factor of the cotangents of the loss, a tensor of one element.
        update: updates the parameters, in a step that has updates.
        common: facts beside the call on which all ranks that train together have to agree.
        carry: first carries of sequences.
        devices: devices of stages, by stage, whose parameters are on the device meta.
    """

    params: Mapping[int, Any]
    inputs: Any
    targets: Any = None
    extras: Mapping[int, Any] | None = None
    state: Mapping[int, Any] | None = None
    loss_weights: LossWeights = None
    seed: Seed = None
    microbatch_offset: int = 0
    scale: torch.Tensor | None = None
    update: ParameterUpdate | None = None
    common: str = ""
    carry: Mapping[int, Any] | None = None
    devices: Mapping[int, torch.device] = field(default_factory=dict)


def named_step(read: Callable[P, RawArguments]) -> Callable[P, RawArguments]:
    """Rename a function to ``step``: Python's errors about its arguments then name what the caller calls."""
    read.__name__ = read.__qualname__ = "step"
    return read


@named_step
def read_call(
    params: Mapping[int, Any],
    inputs: Any,
    targets: Any = None,
    *,
    loss_weights: LossWeights = None,
    seed: Seed = None,
    extras: Mapping[int, Any] | None = None,
    state: Mapping[int, Any] | None = None,
    carry: Mapping[int, Any] | None = None,
) -> RawArguments:
    """Read the arguments of a step as the caller writes them."""
    return RawArguments(params, inputs, targets, extras, state, loss_weights, seed, carry=carry)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArguments(RawArguments):
    """Hold the arguments of one call, read and checked.

    Params and state are leaves, by stage of the model in the caller's order, without history; inputs, targets
    and extras those of every microbatch, empty if this process was given none; carries those of every
    sequence; loss weights float64[m], or
    None for ``1/m`` each.

    Args:
        form: form of all of them.
        left_out: the microbatches whose weight is 0, where the host knows it.
    """

    extras: Mapping[int, Sequence[Leaves]]
    state: Mapping[int, Leaves]
    carry: Mapping[int, Sequence[Leaves]]
    loss_weights: torch.Tensor | None
    form: StepForm
    left_out: frozenset[int]

    def example(self, stage: int) -> Any:
        """Return the parameters of a stage of the model, to evaluate it abstractly.

        Under a transform, return their signature.
        """
        leaves, signature = self.params[stage], self.form.params[stage]
        return signature if any(map(is_wrapped, leaves)) else signature.unflatten(leaves)


def read_arguments(
    raw: RawArguments,
    schedule: Schedule,
    stages: Sequence[int],
    targeted: Collection[int] | None,
    last: StepForm | None = None,
    weights: torch.Tensor | None = None,
    *,
    abstract: bool = False,
    mixed: bool = False,
) -> StepArguments:
    """Read the arguments of a call in a process that runs ``stages`` of the model.

    Args:
        targeted: the stages of the model that take targets; None without a loss function.
        last: form of an earlier call; if these have the same, ``form`` is that object.
        weights: weights of the microbatches in the loss, [m], for a call that gives no weights.
        abstract: accept signatures for trees, and tensors without values.
        mixed: whether peers take part in every backward, so that weights of 0 leave nothing out.

    Raises:
        ValueError, TypeError: they do not fit the schedule.
    """
    m = schedule.microbatches
    with_targets = targeted is not None
    for name in ("targets", "loss_weights"):
        if getattr(raw, name) is not None and not with_targets:
            raise ValueError(
                f"{name} needs a loss function, which reads them; give loss_fn, or leave {name} out"
            )
    require_trees("params", raw.params, stages)
    extras = {} if raw.extras is None else raw.extras
    state = {} if raw.state is None else raw.state
    require_trees("extras", extras, stages, some=True)
    require_trees("state", state, stages, some=True)
    carry = {} if raw.carry is None else raw.carry
    if not schedule.slices and carry:
        raise ValueError(f"carry: got one, and the schedule {schedule.name!r} has no slices; leave it out")
    if schedule.replicas and carry:
        raise ValueError(
            f"carry: got one, and stages of the schedule {schedule.name!r} have replicas; leave it out"
        )
    if carry:  # of all stages, since a stage left out would begin anew
        require_trees("carry", carry, stages)
    _require_cut(raw, schedule)
    reader = _Reader({} if last is None else last.trees, m, abstract)
    params = {s: reader.read_detached(tree, f"params[{s}]") for s, tree in raw.params.items()}
    states = {s: reader.read_detached(tree, f"state[{s}]") for s, tree in state.items()}
    inputs = () if raw.inputs is None else reader.read_batch(raw.inputs, "inputs")
    # None is a target as any other tree, for a model that returns its loss.
    given = targeted is not None and (raw.targets is not None or not {*stages}.isdisjoint(targeted))
    targets = reader.read_batch(raw.targets, "targets") if given else ()
    batches = {s: reader.read_batch(extras[s], f"extras[{s}]") for s in stages if s in extras}
    carries = {
        s: [reader.read_detached(one, f"carry[{s}][{n}]") for n, one in enumerate(tree)]
        for s, tree in carry.items()
    }
    weights = weights if raw.loss_weights is None else read_loss_weights(raw.loss_weights, m)
    if schedule.slices and with_targets and weights is None:
        _warn_of_tokens(raw.inputs, schedule)
    left_out, weightless = (frozenset[int](),) * 2 if abstract or mixed else _zeros(weights, schedule)
    if (
        last is not None
        and last.weightless == weightless
        and last.trees.keys() == reader.trees.keys()
        and all(tree is last.trees[name] for name, tree in reader.trees.items())
    ):
        form = last
    else:
        heads = {schedule.model_stages[stage] for stage in schedule.heads}
        if raw.inputs is None and not heads.isdisjoint(stages):
            first = min(heads.intersection(stages))
            raise ValueError(f"inputs: got None, but this process runs stage {first}, which needs them")
        if not abstract:
            for name, tree in reader.trees.items():
                require_values(name, tree.form.treedef, tree.devices)
        form = step_form(reader.trees, stages, m, params, inputs, raw.devices, weightless)
    seed = read_seed(raw.seed)
    return StepArguments(
        params, inputs, targets, seed, raw.microbatch_offset, raw.scale, raw.update, raw.common,
        devices=raw.devices, extras=batches, state=states, carry=carries, loss_weights=weights, form=form,
        left_out=left_out,
    )  # fmt: skip


def by_value(known: Any, batch: Any, microbatches: int) -> Any:
    """Read the values of the inputs that belong to the form of a microbatch.

    Args:
        known: knows them by name, see :func:`ppfunc.split`.
        batch: a tree of inputs, or Microbatches.
        microbatches: number of microbatches in which a tree is cut.

    Raises:
        ValueError: they are others in each microbatch of a tree.
    """

    def shared(value: Any) -> Any:
        parts = [value.tree] if isinstance(value, Replicated) else microbatch(value, microbatches)
        first, *others = map(constants.by_value, parts)
        if any(tree_structure(first) != tree_structure(other) for other in others):
            raise ValueError(
                "inputs: got a constant of the split with other values in each microbatch, expected the same"
                " values; give the inputs as ppfunc.Microbatches([...])"
            )
        return first

    return batch.map(known.read) if isinstance(batch, Microbatches) else known.read(batch, shared)


class _Reader:
    """Reads trees, and records the form of each by its name.

    Args:
        known: forms of an earlier call; a tree of the same form gets that object.
        microbatches: number of microbatches of a whole batch.
        abstract: accept signatures for trees.
    """

    def __init__(self, known: Mapping[str, TreeForm], microbatches: int, abstract: bool) -> None:
        self.trees: dict[str, TreeForm] = {}
        self._known, self._microbatches, self._abstract = known, microbatches, abstract

    def read(self, tree: Any, name: str, microbatches: int | None = None) -> Leaves:
        """Read the leaves of a tree.

        ``microbatches`` is the number of parts of a whole batch, 0 for one microbatch, None for trees that
        belong to no batch.
        """
        if self._abstract and isinstance(tree, Signature):
            tree = tree.wrap(torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in tree.leaves)
        known = self._known.get(name)
        leaves = None if known is None else same_form(tree, known.form)
        if leaves is None and microbatches is not None:
            tree = with_constants(tree, name)
            leaves = None if known is None else same_form(tree, known.form)
        if known is not None and leaves is not None:
            self.trees[name] = known
        else:
            leaves, self.trees[name] = read_tree(tree, name, microbatches or 0)
        return leaves

    def read_detached(self, tree: Any, name: str) -> Leaves:
        """Read tensors without their autograd history, so that no graph grows with the steps."""
        leaves = self.read(tree, name)
        if self.trees[name].tracked:
            leaves = tuple([t.detach() if t.requires_grad and not is_wrapped(t) else t for t in leaves])
        return leaves

    def read_batch(self, batch: Any, name: str) -> Sequence[Leaves]:
        m = self._microbatches
        if isinstance(batch, Microbatches):
            if len(batch) != m:
                raise ValueError(
                    f"{name}: got {len(batch)} microbatches, the schedule has {m}; cut the batch into that"
                    " many"
                )
            return [self.read(tree, f"{name}[{i}]", 0) for i, tree in enumerate(batch)]
        leaves = self.read(batch, name, m)
        if isinstance(batch, list) and batch and not leaves:
            raise TypeError(
                f"{name}: got {shown(batch)}, expected tensors; make the list a tensor, torch.tensor({name})"
            )
        return self.trees[name].cut(leaves, m)


def read_loss_weights(weights: LossWeights, microbatches: int) -> torch.Tensor | None:
    """Read the weights of the microbatches.

    Returns:
        float64[m]; None for ``1/m`` each.

    Raises:
        ValueError: wrong number of weights, or weights on the host that are not finite.
        TypeError: not numbers.
    """
    if weights is None:
        return None
    try:
        if torch.is_tensor(weights) and weights.is_complex():
            raise TypeError("complex weights")
        device = weights.device if isinstance(weights, torch.Tensor) else "cpu"
        # A transform would wrap the tensor that is made of a list.
        with nullcontext() if torch.is_tensor(weights) else without_transforms():
            read = torch.as_tensor(weights, dtype=torch.float64, device=device)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"loss_weights: got {reprlib.repr(weights)}, expected one number for each of the {microbatches}"
            " microbatches"
        ) from error
    if read.shape != (microbatches,):
        raise ValueError(
            f"loss_weights: got shape {tuple(read.shape)}, expected one weight for each of the {microbatches}"
            " microbatches"
        )
    if read.device.type == "cpu" and not is_wrapped(read) and not all(map(math.isfinite, read.tolist())):
        raise ValueError(f"loss_weights: got {reprlib.repr(read.tolist())}, expected finite numbers")
    return read


def _zeros(weights: torch.Tensor | None, schedule: Schedule) -> tuple[frozenset[int], frozenset[int]]:
    """Find the microbatches of weight 0, as far as the host knows the weights and no transform hides them.

    Returns:
        Microbatches that are left out, and slices that still carry, since later slices weigh.
    """
    if weights is None or weights.device.type != "cpu" or is_wrapped(weights):
        return frozenset(), frozenset()
    slices = schedule.per_sequence
    rows = weights.view(-1, slices).tolist()
    zeros = {n * slices + m for n, row in enumerate(rows) for m, weight in enumerate(row) if weight == 0}
    out = frozenset(m for m in zeros if not any(rows[m // slices][m % slices :]))
    return out, frozenset(zeros - out)


def _warn_of_tokens(inputs: Any, schedule: Schedule) -> None:
    """Warn of slices with unlike numbers of tokens, which weigh the same."""
    lengths = inputs._cut.lengths if isinstance(inputs, Microbatches) and inputs._cut else ()
    if len(set(lengths)) > 1:
        tokens, sequences = sum(lengths), schedule.sequences
        warn(
            f"slices of {list(lengths)} tokens have equal weights, so that tokens count unlike in a loss that"
            f" is their mean; pass loss_weights=[n / {tokens * sequences} for n in {list(lengths)}] *"
            f" {sequences}, or, where it is meant, [1 / {schedule.microbatches}] * {schedule.microbatches}"
        )


def _require_cut(raw: RawArguments, schedule: Schedule) -> None:
    """Raise ValueError for batches that are cut otherwise than the schedule, and others than the inputs.

    Whole batches are refused under a schedule of slices: nothing says along which axis to cut.
    """
    k = schedule.slices
    inputs: SequenceCut | None = None
    extras = {f"extras[{s}]": batch for s, batch in (raw.extras or {}).items()}
    for name, batch in {"inputs": raw.inputs, "targets": raw.targets, **extras}.items():
        if k > 1 and batch is not None and not isinstance(batch, Microbatches):
            raise ValueError(
                f"{name}: got a whole batch, and the schedule {schedule.name!r} has {k} slices of a sequence;"
                f" cut it, ppfunc.microbatch({name}, {schedule.sequences}, slices={k})"
            )
        cut = batch._cut if isinstance(batch, Microbatches) else None
        if cut is not None and (len(cut.lengths) or 1) != max(k, 1):
            more, got = f", slices={k}" if k else "", len(cut.lengths) or "no"
            raise ValueError(
                f"{name}: got sequences in {got} slices, the schedule {schedule.name!r} has"
                f" {k or 'none'}; ppfunc.microbatch({name}, {schedule.sequences}{more}) cuts as many"
            )
        if name == "inputs":
            inputs = cut
        # A loss might broadcast other rows, or as many tokens that are cut otherwise.
        if (
            inputs
            and cut
            and inputs.rows
            and cut.rows
            and (
                inputs.rows != cut.rows
                or (inputs.lengths != cut.lengths and sum(inputs.lengths) == sum(cut.lengths))
            )
        ):
            raise ValueError(
                f"{name}: got {cut.rows} rows in slices of {list(cut.lengths)} tokens, the inputs have"
                f" {inputs.rows} in {list(inputs.lengths)}; cut both alike"
            )
    for stage, batch in (raw.carry or {}).items():
        if not isinstance(batch, Microbatches) or len(batch) != schedule.sequences:
            raise ValueError(
                f"carry[{stage}]: got {batch if isinstance(batch, Microbatches) else shown(batch)}, expected"
                f" ppfunc.Microbatches of a tree for each of the {schedule.sequences} sequences"
            )


def by_stage(trees: Any, name: str) -> Mapping[int, Any]:
    """Return the trees, which are given by stage; raise TypeError for anything else."""
    if not isinstance(trees, Mapping):
        raise TypeError(
            f"{name}: got {shown(trees)}, expected a dictionary {{stage: tree}}, such as split.params,"
            " split.state or state.params"
        )
    return trees


def require_trees(name: str, trees: Any, stages: Sequence[int], *, some: bool = False) -> None:
    """Raise TypeError or ValueError unless these are trees of these stages, or of some of them."""
    fewer = set(by_stage(trees, name)) < set(stages)
    if set(trees) != set(stages) and not (fewer and some):
        mend = "; where processes run a pipeline together, each gives a transport, such as ppfunc.P2P(group)"
        of_all = f"give those, as {{s: {name}[s] for s in {list(stages)}}}{mend if fewer else ''}"
        raise ValueError(
            f"{name}: got the stages {list(trees)}, this process runs {list(stages)};"
            f" {'give some of those' if some else of_all}"
        )


def read_seed(seed: Any) -> Seed:
    """Read a seed, two integers.

    Raises:
        TypeError: not two integers.
    """
    if seed is None:
        return None
    if (
        isinstance(seed, tuple | list)
        and len(seed) == 2
        and all(isinstance(n, Integral) and not isinstance(n, bool) for n in seed)
    ):
        return int(seed[0]), int(seed[1])
    raise TypeError(f"seed: got {reprlib.repr(seed)}, expected (seed, step), two integers")
