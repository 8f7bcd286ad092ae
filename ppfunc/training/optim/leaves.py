"""Flatten trees for the fused kernels of torch: lists of real row-major tensors, by device and dtype."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from optree import PyTreeSpec
from torch import Tensor

from ppfunc.runtime.call.forms import Form, form_of, same_form, sharing
from ppfunc.stage._torch import FakeTensor
from ppfunc.stage.signature import differentiable, flatten
from ppfunc.stage.tree import tree_paths

from .._torch import copy_into_each
from .protocols import Tree


class LeafPlan(NamedTuple):
    """Describe how to flatten the trees of an update, for trees of one form.

    Args:
        forms: of the parameters, of their gradients, and of each tree of the state.
        trained: the leaves of the parameters that have gradients.
        groups: the decay, and positions in ``trained`` of leaves with that decay, one device and one real
            dtype.
        plain: the kernels can work on the tensors as they are.
    """

    forms: tuple[Form, ...]
    trained: tuple[int, ...]
    groups: tuple[tuple[float, tuple[int, ...]], ...]
    plain: bool


Leaves = tuple[Tensor, ...]


def leaves_of(plan: LeafPlan, trees: Sequence[Tree]) -> list[Leaves] | None:
    """Return the leaves of trees that have the forms of a plan, else None."""
    leaves = []
    for tree, form in zip(trees, plan.forms, strict=True):
        same = same_form(tree, form)
        if same is None:
            return None
        leaves.append(same)
    return leaves


def plan_of(
    params: Tree, grads: Tree, states: Mapping[str, Tree], decays: Sequence[float]
) -> tuple[LeafPlan, list[Leaves]]:
    """Check that the trees of an update fit together; return their plan and their leaves.

    Args:
        decays: of every parameter.

    Raises:
        ValueError: gradients or state that do not match the parameters; names the leaf.
    """
    wanted, structure = flatten(params, "params")
    gradients, of_grads = flatten(grads, "grads")
    require_match("grads", gradients, of_grads, wanted, structure)
    for name, tree in states.items():
        state_column(name, tree, wanted, structure)
    pairs = [flatten(tree) for tree in (params, grads, *states.values())]
    trained = tuple(n for n, p in enumerate(wanted) if differentiable(p.dtype))
    groups: dict[tuple[torch.device, torch.dtype, float], list[int]] = {}
    for k, n in enumerate(trained):
        p = wanted[n]
        dtype = p.real.dtype if p.dtype.is_complex else p.dtype
        groups.setdefault((p.device, dtype, decays[n]), []).append(k)
    plain = all(_is_plain(leaf) for leaves, _ in pairs for leaf in leaves if differentiable(leaf.dtype))
    forms = tuple(form_of(leaves, treedef) for leaves, treedef in pairs)
    alike = tuple((decay, tuple(group)) for (_, _, decay), group in groups.items())
    return LeafPlan(forms, trained, alike, plain), [tuple(leaves) for leaves, _ in pairs]


def state_column(
    name: str,
    tree: Tree,
    params: Sequence[Tensor],
    treedef: PyTreeSpec,
    shape_of: Callable[[torch.Size], Sequence[int] | None] = tuple,
) -> list[Tensor | None]:
    """Return the leaf of each parameter in a tree of the state; None where it has none.

    Raises:
        ValueError: a leaf that does not match its parameter.
    """
    try:
        column: list[Any] = treedef.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(f"{name} must have the structure of params: {error}") from error
    for n, (p, leaf) in enumerate(zip(params, column, strict=True)):
        shape = shape_of(p.shape) if differentiable(p.dtype) else None
        expected = "nothing" if shape is None else f"{p.dtype}{list(shape)} on {p.device}"
        got = "nothing" if leaf is None else f"{leaf.dtype}{list(leaf.shape)} on {leaf.device}"
        if got != expected:
            path = tree_paths(treedef, name)[n]
            raise ValueError(f"{path} must match its parameter: got {got}, expected {expected}")
    return column


def require_match(
    name: str, got: Sequence[Tensor], structure: PyTreeSpec, wanted: Sequence[Tensor], expected: PyTreeSpec
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


def owned(plan: LeafPlan, names: Sequence[str], leaves: Sequence[Leaves], donate: bool) -> list[Leaves]:
    """Copy the parameters and the state for an update in place; donated ones are taken as they are.

    Args:
        names: of the trees, the parameters first.

    Returns:
        The leaves of each tree that the update writes into.

    Raises:
        ValueError: donated leaves that share memory.
    """
    columns = [trained_leaves(plan, leaves[0]), *leaves[1:]]  # a state has no others
    if not donate:
        return [_copies(column) for column in columns]
    if not plan.plain:
        columns = [tuple(map(_dense, column)) for column in columns]
    _require_own_memory(plan, columns, names)
    return columns


def rebuilt(plan: LeafPlan, params: Leaves, columns: Sequence[Leaves]) -> list[Tree]:
    """Make the trees after an update of the leaves that it has written into."""
    every = list(params)
    for n, leaf in zip(plan.trained, columns[0], strict=True):
        every[n] = leaf
    of_params, _, *of_state = plan.forms
    trees = zip((of_params, *of_state), (every, *columns[1:]), strict=True)
    return [form.treedef.unflatten(leaves) for form, leaves in trees]


def for_kernels(plan: LeafPlan, leaves: Leaves) -> Leaves:
    """View leaves in row-major memory in real dtypes: the kernels know no complex numbers."""
    if plan.plain:
        return leaves
    return tuple(torch.view_as_real(x) if x.dtype.is_complex else x for x in map(_dense, leaves))


def trained_leaves(plan: LeafPlan, leaves: Leaves) -> Leaves:
    """Return those of the leaves of the parameters, or of their gradients, that train."""
    return leaves if len(plan.trained) == len(leaves) else tuple(leaves[n] for n in plan.trained)


def _dense(leaf: Tensor) -> Tensor:
    """Put a leaf into row-major memory, without history.

    The kernels walk the memory of several tensors side by side.
    """
    return leaf if _is_dense(leaf) else leaf.detach().resolve_conj().resolve_neg().contiguous()


def _is_dense(leaf: Tensor) -> bool:
    return not (leaf.requires_grad or leaf.is_conj() or leaf.is_neg()) and leaf.is_contiguous()


def _is_plain(leaf: Tensor) -> bool:
    return _is_dense(leaf) and not leaf.dtype.is_complex


def _copies(leaves: Leaves) -> Leaves:
    """Copy leaves into row-major memory."""
    fresh = tuple(torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device) for leaf in leaves)
    if fresh:
        copy_into_each(fresh, leaves)
    return fresh


def _require_own_memory(plan: LeafPlan, columns: Sequence[Leaves], names: Sequence[str]) -> None:
    """Raise ValueError if two leaves share memory, which in-place updates would change twice."""
    every = [leaf for column in columns for leaf in column]
    if every and isinstance(every[0], FakeTensor):
        return  # without values, nor addresses
    if len(set(map(Tensor.data_ptr, every))) == len(every):
        return
    forms = plan.forms[0], *plan.forms[2:]
    of_params, *of_state = (tree_paths(form.treedef, name) for form, name in zip(forms, names, strict=True))
    paths = [*(of_params[n] for n in plan.trained), *chain(*of_state)]
    for one, other in sharing(every, [leaf.nbytes for leaf in every]):
        raise ValueError(
            f"{paths[one]} and {paths[other]} share their memory, so that they cannot both be updated in"
            " place; pass donate=False or make them separate tensors"
        )
