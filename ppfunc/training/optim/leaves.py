"""Flatten trees for the fused kernels of torch: lists of real row-major tensors, by device and dtype."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from optree import PyTreeSpec
from torch import Tensor

from ppfunc.runtime.agreement.ties import sharing
from ppfunc.stage._torch import FakeTensor
from ppfunc.stage.form import Form, form_of, same_form
from ppfunc.stage.signature import differentiable, flatten
from ppfunc.stage.tree import tree_map, tree_paths, tree_structure

from .._torch import copy_into_each
from .protocols import Tree


class LeafPlan(NamedTuple):
    """Describe how to flatten the trees of an update, for trees of one form.

    Args:
        forms: of the parameters, of their gradients, and of each tree of the state.
        trained: the leaves of the parameters that have gradients.
        groups: positions among them, of one device and real dtype each.
        plain: the kernels can work on the tensors as they are.
    """

    forms: tuple[Form, ...]
    trained: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
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


def plan_of(params: Tree, grads: Tree, states: dict[str, Tree]) -> tuple[LeafPlan, list[Leaves]]:
    """Check that the trees of an update fit together; return their plan and their leaves.

    Raises:
        ValueError: gradients or state that do not match the parameters; names the leaf.
    """
    wanted, structure = flatten(params, "params")
    trained = tuple(n for n, p in enumerate(wanted) if differentiable(p.dtype))
    trained_leaves = [wanted[n] for n in trained]
    leaves, forms = [wanted], [form_of(wanted, structure)]
    for name, tree in (("grads", grads), *states.items()):
        got, got_structure = flatten(tree, name)
        if name == "grads":
            require_match(name, got, got_structure, wanted, structure)
        else:
            require_match(name, got, got_structure, trained_leaves, tree_structure(_trained_only(params)))
        leaves.append(got)
        forms.append(form_of(got, got_structure))
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for n, p in enumerate(trained_leaves):
        groups.setdefault((p.device, p.real.dtype if p.dtype.is_complex else p.dtype), []).append(n)
    plain = all(_is_plain(leaf) for tree in leaves for leaf in tree if differentiable(leaf.dtype))
    return LeafPlan(tuple(forms), trained, tuple(map(tuple, groups.values())), plain), leaves


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


def _trained_only(params: Tree) -> Tree:
    return tree_map(lambda p: p if differentiable(p.dtype) else None, params)


def owned(
    plan: LeafPlan, trees: Mapping[str, Tree], leaves: Sequence[Leaves], donate: bool
) -> tuple[list[Tree], list[Sequence[Tensor]]]:
    """Copy the parameters and the state for an update in place; donated ones are taken as they are.

    Args:
        trees: by name, the parameters first.

    Returns:
        The trees, and the leaves of each for the kernels.

    Raises:
        ValueError: donated leaves that share memory.
    """
    columns: list[Sequence[Tensor]] = [_trained(plan, leaves[0]), *leaves[1:]]  # a state has no others
    if not (donate and plan.plain):
        columns = [list(map(_dense, column)) if donate else _copies(column) for column in columns]
        every = list(leaves[0])
        for n, leaf in zip(plan.trained, columns[0], strict=True):
            every[n] = leaf
        pairs = zip(trees.items(), (every, *columns[1:]), strict=True)
        trees = {name: tree_structure(tree).unflatten(column) for (name, tree), column in pairs}
        columns = [list(map(_as_real, column)) for column in columns]
    if donate:
        _require_own_memory(plan, columns, trees)
    return list(trees.values()), columns


def gradients_of(plan: LeafPlan, leaves: Leaves) -> Sequence[Tensor]:
    """Return the gradients for the kernels."""
    trained = _trained(plan, leaves)
    return trained if plan.plain else [_as_real(_dense(leaf)) for leaf in trained]


def _trained(plan: LeafPlan, leaves: Leaves) -> Sequence[Tensor]:
    return leaves if len(plan.trained) == len(leaves) else [leaves[n] for n in plan.trained]


def _as_real(leaf: Tensor) -> Tensor:
    """View the same memory in a real dtype: the kernels know no complex numbers."""
    return torch.view_as_real(leaf) if leaf.dtype.is_complex else leaf


def _dense(leaf: Tensor) -> Tensor:
    """Put a leaf into row-major memory, without history.

    The kernels walk the memory of several tensors side by side.
    """
    return leaf if _is_dense(leaf) else leaf.detach().resolve_conj().resolve_neg().contiguous()


def _is_dense(leaf: Tensor) -> bool:
    return not (leaf.requires_grad or leaf.is_conj() or leaf.is_neg()) and leaf.is_contiguous()


def _is_plain(leaf: Tensor) -> bool:
    return _is_dense(leaf) and not leaf.dtype.is_complex


def _copies(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Copy leaves into row-major memory."""
    fresh = [torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device) for leaf in leaves]
    if fresh:
        copy_into_each(fresh, list(leaves))
    return fresh


def _require_own_memory(
    plan: LeafPlan, columns: Sequence[Sequence[Tensor]], trees: Mapping[str, Tree]
) -> None:
    """Raise ValueError if two leaves share memory, which in-place updates would change twice."""
    every = [leaf for column in columns for leaf in column]
    if every and isinstance(every[0], FakeTensor):
        return  # without values, nor addresses
    if len(set(map(Tensor.data_ptr, every))) == len(every):
        return
    paths, *further = (tree_paths(tree_structure(tree), name) for name, tree in trees.items())
    names = [*(paths[n] for n in plan.trained), *chain(*further)]
    for one, other in sharing(every, [leaf.nbytes for leaf in every]):
        raise ValueError(
            f"{names[one]} and {names[other]} share their memory, so that they cannot both be updated in"
            " place; pass donate=False or make them separate tensors"
        )
