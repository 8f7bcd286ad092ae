"""Flatten trees for the fused kernels of torch: lists of real row-major tensors, by device and dtype."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from optree import PyTreeSpec

from ppfunc.runtime.lowering.ties import sharing
from ppfunc.runtime.values.arguments import Form, form_of, same_form
from ppfunc.stage._torch import FakeTensor
from ppfunc.stage.signature import differentiable, flatten
from ppfunc.stage.tree import tree_leaves, tree_paths, tree_structure

from ._torch import copy_into_each
from .protocols import Leaves, Tree


class LeafPlan(NamedTuple):
    """Describe the leaves of the trees of an update, for trees of one form.

    Args:
        structures: of the parameters, of their gradients, and of the state.
        forms: likewise; none for trees that a transform wraps.
        spans: by name, the leaves of each tree of the state, and its structure.
        columns: the names of the trees of the state that are like the parameters.
        decays: of every parameter.
        trained: the leaves of the parameters that have gradients.
        groups: the decay, and positions in ``trained`` of leaves with that decay, one device and one real
            dtype.
        plain: the kernels can work on the tensors as they are.
    """

    structures: tuple[PyTreeSpec, ...]
    forms: tuple[Form, ...]
    spans: Mapping[str, tuple[slice, PyTreeSpec]]
    columns: tuple[str, ...]
    decays: Sequence[float]
    trained: tuple[int, ...]
    groups: tuple[tuple[float, tuple[int, ...]], ...]
    plain: bool


def leaves_of(plan: LeafPlan, trees: Sequence[Tree]) -> list[Leaves] | None:
    """Return the leaves of trees that have the forms of a plan, else None."""
    leaves: list[Leaves] = []
    for tree, form in zip(trees, plan.forms, strict=True):
        same = same_form(tree, form)
        if same is None:
            return None
        leaves.append(same)
    return leaves


def plan_of(
    params: Tree, grads: Tree, state: Mapping[str, Tree], names: tuple[str, ...], decays: Sequence[float],
    *, guarded: bool = True,
) -> tuple[LeafPlan, list[Leaves]]:  # fmt: skip
    """Check that the trees of an update fit together; return their plan and their leaves.

    Args:
        names: of the trees of the state that are like the parameters.
        decays: of every parameter.
        guarded: note their forms.

    Raises:
        ValueError: gradients or state that do not match the parameters; names the leaf.
    """
    (wanted, structure), (gradients, of_grads) = flatten(params, "params"), flatten(grads, "grads")
    require_match("grads", gradients, of_grads, wanted, structure)
    columns = {name: state_column(name, state[name], wanted, structure) for name in names}
    state = {**state, **{name: structure.unflatten(each) for name, each in columns.items()}}  # in their order
    pairs = [(wanted, structure), (gradients, of_grads), flatten(state, "state")]
    trained = tuple(n for n, p in enumerate(wanted) if differentiable(p.dtype))
    groups: dict[tuple[torch.device, torch.dtype, float], list[int]] = {}
    for k, n in enumerate(trained):
        p = wanted[n]
        dtype = p.real.dtype if p.dtype.is_complex else p.dtype
        groups.setdefault((p.device, dtype, decays[n]), []).append(k)
    spans, first = {}, 0
    for name, tree in state.items():
        last = first + len(tree_leaves(tree))
        spans[name], first = (slice(first, last), tree_structure(tree)), last
    every = chain(wanted, gradients, *columns.values())
    floating = (leaf for leaf in every if leaf is not None and differentiable(leaf.dtype))
    plan = LeafPlan(
        tuple(treedef for _, treedef in pairs),
        tuple(form_of(*pair) for pair in pairs) if guarded else (),
        spans,
        names,
        decays,
        trained,
        tuple((decay, tuple(group)) for (_, _, decay), group in groups.items()),
        guarded and all(_is_dense(leaf) and not leaf.dtype.is_complex for leaf in floating),
    )
    return plan, [tuple(leaves) for leaves, _ in pairs]


def state_column(
    name: str, tree: Tree, params: Sequence[torch.Tensor], treedef: PyTreeSpec
) -> list[torch.Tensor | None]:
    """Return the leaf of each parameter in a tree of the state; None for parameters that do not train.

    Raises:
        ValueError: a leaf that does not match its parameter.
    """
    try:
        column: list[Any] = treedef.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(f"{name} must have the structure of params: {error}") from error
    for n, (p, leaf) in enumerate(zip(params, column, strict=True)):
        expected = f"{p.dtype}{list(p.shape)} on {p.device}" if differentiable(p.dtype) else "nothing"
        got = "nothing" if leaf is None else f"{leaf.dtype}{list(leaf.shape)} on {leaf.device}"
        if got != expected:
            path = tree_paths(treedef, name)[n]
            raise ValueError(f"{path} must match its parameter: got {got}, expected {expected}")
    return column


def require_match(
    name: str,
    got: Sequence[torch.Tensor],
    structure: PyTreeSpec,
    wanted: Sequence[torch.Tensor],
    expected: PyTreeSpec,
) -> None:
    """Raise ValueError unless a tree has the structure, shapes, dtypes and devices of the parameters."""
    if structure != expected:
        raise ValueError(f"{name} must have the structure of params, got {structure} and expected {expected}")
    for n, (g, p) in enumerate(zip(got, wanted, strict=True)):
        if g.shape != p.shape or g.dtype != p.dtype or g.device != p.device:
            raise ValueError(
                f"{tree_paths(expected, name)[n]} must match its parameter: got {g.dtype}{list(g.shape)} "
                f"on {g.device}, expected {p.dtype}{list(p.shape)} on {p.device}"
            )


def owned(plan: LeafPlan, columns: Sequence[Leaves], donate: bool) -> list[Leaves]:
    """Copy the parameters that train and the state for an update in place; donated ones stay where they are.

    Returns:
        The leaves of each tree that the update writes into.
    """
    if not donate:
        return [_copies(column) for column in columns]
    return list(columns) if plan.plain else [tuple(map(dense, column)) for column in columns]


def for_kernels(plan: LeafPlan, leaves: Leaves) -> Leaves:
    """View leaves in row-major memory in real dtypes: the kernels know no complex numbers."""
    if plan.plain:
        return leaves
    return tuple(torch.view_as_real(x) if x.dtype.is_complex else x for x in map(dense, leaves))


def trained_leaves(plan: LeafPlan, leaves: Leaves) -> Leaves:
    """Return those of the leaves of the parameters, or of their gradients, that train."""
    return leaves if len(plan.trained) == len(leaves) else tuple(leaves[n] for n in plan.trained)


def dense(leaf: torch.Tensor) -> torch.Tensor:
    """Put a leaf into row-major memory, without history.

    The kernels walk the memory of several tensors side by side.
    """
    return leaf if _is_dense(leaf) else leaf.detach().resolve_conj().resolve_neg().contiguous()


def _is_dense(leaf: torch.Tensor) -> bool:
    return not (leaf.requires_grad or leaf.is_conj() or leaf.is_neg()) and leaf.is_contiguous()


def _copies(leaves: Leaves) -> Leaves:
    fresh = tuple(torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device) for leaf in leaves)
    if fresh:
        copy_into_each(fresh, tuple(leaves))
    return fresh


def require_own_memory(plan: LeafPlan, leaves: Sequence[Leaves]) -> None:
    """Raise ValueError if two donated leaves share memory, which in-place updates would change twice."""
    params, _, state = leaves
    spans = {name: plan.spans[name] for name in plan.columns}
    every = [*trained_leaves(plan, params), *chain(*(state[span] for span, _ in spans.values()))]
    if not plan.plain:
        every = list(map(dense, every))
    if every and isinstance(every[0], FakeTensor):
        return  # without values, nor addresses
    if len(set(map(torch.Tensor.data_ptr, every))) == len(every):
        return
    of_params = tree_paths(plan.structures[0], "params")
    of_state = (path for name, (_, treedef) in spans.items() for path in tree_paths(treedef, name))
    paths = [*(of_params[n] for n in plan.trained), *of_state]
    for one, other in sharing(every, [leaf.nbytes for leaf in every]):
        raise ValueError(
            f"{paths[one]} and {paths[other]} share their memory, so that they cannot both be updated in"
            " place; pass donate=False or make them separate tensors"
        )
