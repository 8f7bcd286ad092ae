"""Make optimizers of formulas of one leaf, and of fused kernels that compute the same in place.

A kernel runs where nobody looks through the update. Under ``torch.func`` transforms and autograd the formula
does.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ppfunc._text import naming_arguments, shown
from ppfunc.stage import Signature
from ppfunc.stage.device import accelerates
from ppfunc.stage.modules.frozen import Mask, masked_leaves
from ppfunc.stage.signature import differentiable, flatten
from ppfunc.stage.tree import tree_flatten

from ..checks import require_number
from .formulas import Formula
from .leaves import LeafPlan, gradients_of, leaves_of, owned, plan_of, require_match
from .protocols import Optimizer, Tree, selected
from .seen import looked_through

LearningRate = float | Callable[[Tensor], Tensor | float]
"""Number, or function of the number of updates made before, such as :func:`warmup_cosine`."""

Kernel = Callable[..., None]
"""``kernel(params, grads, *states, step, *, lr, weight_decay, found_inf)`` updates lists in place."""

Shapes = Mapping[str, Callable[[torch.Size], Sequence[int] | None]]
"""By the name of a tree of the state: from the shape of a parameter to that of its leaf, None for none."""

# Numbers of updates at which ranks compare a rate of which only a name is known.
_PROBED = 0, 1, 10, 100, 1_000, 10_000, 100_000


def optimizer_of(
    name: str,
    numbers: str,
    formula: Formula,
    states: Sequence[str] | Shapes,
    lr: LearningRate,
    weight_decay: float,
    mask: Mask | None,
    kernel: Kernel | None = None,
    donate: bool = False,
) -> Optimizer:
    """Make an optimizer whose state counts its updates, and has trees that begin with zeros.

    Args:
        name, numbers: for its text.
        formula: of one leaf.
        states: the names of the trees, of leaves like the parameters, or their shapes as well.
        weight_decay, mask: see :func:`adamw`.
        kernel: computes the same, in place.
        donate: let the kernel write into its arguments.
    """
    if mask is not None and not callable(mask):
        raise TypeError(f"mask: got {shown(mask)}, expected a function mask(params) -> tree of booleans")

    def write() -> str:
        return f"{name}({_text_of_rate(lr)}, {numbers}, weight decay {weight_decay}{_text_of_mask(mask)})"

    text = write()
    of_user = callable(lr) and not getattr(lr, "text", None)  # it may read numbers that change
    shapes = states if isinstance(states, Mapping) else dict.fromkeys(states, lambda shape: shape)
    # The plan of the last update, and groups of leaves by their decay: the next trees mostly have its form.
    last: tuple[LeafPlan, list[tuple[float, tuple[int, ...]]]] | None = None

    def init(params: Tree) -> dict[str, Tree]:
        if mask is not None:
            masked_leaves(mask, Signature.of(params))  # raises for a mask of another form
        leaves, treedef = tree_flatten(params)
        if kernel is None and any(p.dtype.is_complex for p in leaves):
            raise TypeError(f"{text}: got complex parameters, expected real ones; adamw and sgd take them")
        trees = {
            name: treedef.unflatten(
                p.new_zeros(shape) if differentiable(p.dtype) and (shape := of(p.shape)) is not None else None
                for p in leaves
            )
            for name, of in shapes.items()
        }
        return {"updates": zero_count(leaves), **trees}

    @naming_arguments
    def update(
        grads: Tree,
        state: dict[str, Tree],
        params: Tree,
        *,
        found_inf: Tensor | None = None,
    ) -> tuple[Tree, dict[str, Tree]]:
        _require_state(state, tuple(shapes))
        count = state["updates"]
        rate = lr(count) if callable(lr) else lr
        seen = looked_through((rate, grads, state, params))
        with nullcontext() if seen else torch.no_grad():
            of_update = grads, state, params, found_inf, count + 1, rate
            if kernel is None or seen:
                decay = weight_decay, mask
                new, trees = _by_formula(formula, shapes, decay, *of_update)
            else:
                new, trees = in_place(*of_update)
            made = 1 if found_inf is None else (found_inf <= 0).to(count.device)
            return new, {"updates": count + made, **trees}

    def in_place(
        grads: Tree, state: dict[str, Tree], params: Tree, found_inf: Tensor | None, step: Tensor, rate: Any
    ) -> tuple[Tree, dict[str, Tree]]:
        nonlocal last
        assert kernel is not None
        states = {name: state[name] for name in shapes}
        known = last  # read once: another thread may set it
        leaves = None if known is None else leaves_of(known[0], (params, grads, *states.values()))
        if known is None or leaves is None:
            plan, leaves = plan_of(params, grads, states)
            last = known = plan, _groups(plan, weight_decay, mask, params)
        plan, groups = known
        new, columns = owned(plan, {"params": params, **states}, (leaves[0], *leaves[2:]), donate)
        if donate:  # the kernels do not count that they write
            increment_version([leaf for column in columns for leaf in column])
        gradients = gradients_of(plan, leaves[1])
        for decay, group in groups:
            chosen = [
                column if len(group) == len(column) else [column[n] for n in group]
                for column in (columns[0], gradients, *columns[1:])
            ]
            device = chosen[0][0].device
            kernel(
                *chosen,
                step.float().to(device),
                lr=_rate(rate, device),
                weight_decay=decay,
                found_inf=None if found_inf is None else found_inf.to(device, torch.float32),
            )
        return new[0], dict(zip(shapes, new[1:], strict=True))

    def rate_of(state: dict[str, Tree], since: Tensor) -> Tensor | float:
        return lr(state["updates"] + since.to(state["updates"])) if callable(lr) else lr

    return Optimizer(
        init, update, text=write if of_user else text, elementwise=kernel is not None, rate=rate_of
    )


def _by_formula(
    formula: Formula,
    shapes: Shapes,
    decay: tuple[float, Mask | None],
    grads: Tree,
    state: dict[str, Tree],
    params: Tree,
    found_inf: Tensor | None,
    step: Tensor,
    rate: Any,
) -> tuple[Tree, dict[str, Tree]]:
    """Update leaf by leaf by operators that transforms see through."""
    weight_decay, mask = decay
    leaves, treedef = flatten(params, "params")
    gradients, structure = flatten(grads, "grads")
    require_match("grads", gradients, structure, leaves, treedef)
    columns = [_column(name, state[name], treedef, leaves, of) for name, of in shapes.items()]
    decaying = masked_leaves(True if mask is None else mask, Signature.of(params))
    rows = []
    for p, g, decays, *each in zip(leaves, gradients, decaying, *columns, strict=True):
        old = (p.detach() if isinstance(p, nn.Parameter) else p, *each)  # a module's are values
        if differentiable(p.dtype):
            numbers = {"lr": _rate(rate, p.device), "weight_decay": weight_decay if decays else 0.0}
            old = selected(found_inf, old, applied(formula, old, g, step, **numbers))
        rows.append(old)
    by_tree = list(zip(*rows, strict=True)) or [()] * (1 + len(shapes))
    new, *trees = map(treedef.unflatten, by_tree)
    return new, dict(zip(shapes, trees, strict=True))


def applied(
    formula: Formula, old: tuple[Tensor | None, ...], g: Tensor, step: Tensor, **numbers: Any
) -> tuple[Tensor | None, ...]:
    """Apply a formula to a leaf and its states, complex numbers as pairs, in float32 or wider."""
    wide = torch.promote_types(g.real.dtype if g.dtype.is_complex else g.dtype, torch.float32)

    def real(leaf: Tensor | None) -> Tensor | None:
        if leaf is None:
            return None
        return (torch.view_as_real(leaf.resolve_conj()) if leaf.dtype.is_complex else leaf).to(wide)

    def like(was: Tensor | None, leaf: Tensor | None) -> Tensor | None:
        if was is None or leaf is None:
            return None
        return (torch.view_as_complex(leaf) if was.dtype.is_complex else leaf).to(was.dtype)

    p, *states = map(real, old)
    new = formula(p, real(g), *states, step=step.to(g.device, wide), **numbers)
    return tuple(map(like, old, new))


def written_into(
    formula: Formula,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    *rest: Any,
    found_inf: Tensor | None,
    **numbers: Any,
) -> None:
    """Update real leaves in place by a formula, as a kernel does.

    Args:
        rest: the leaves of each tree of the state, and the number of this update.
    """
    *columns, step = rest
    for old, g in zip(zip(params, *columns, strict=True), grads, strict=True):
        for one, new in zip(
            old, selected(found_inf, old, applied(formula, old, g, step, **numbers)), strict=True
        ):
            one.copy_(new)


def require_betas(betas: object) -> None:
    """Raise TypeError or ValueError unless these are two decays below 1."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(
            f"betas is {reprlib.repr(betas)}, expected two numbers, such as (0.9, 0.999), behind lr;"
            " an optimizer is given no parameters"
        )
    for n, beta in enumerate(betas):
        require_number(f"betas[{n}]", beta, below=1.0)


def _text_of_rate(lr: LearningRate) -> str:
    """Write a learning rate as ranks compare it: its numbers, or the name and some values of its function."""
    if not callable(lr):
        require_number(
            "lr",
            lr,
            mend=", or a function of the number of updates, such as ppfunc.optim.warmup_cosine;"
            " an optimizer is given no parameters",
        )
        return f"lr {lr}"
    if text := getattr(lr, "text", None):
        return f"lr {text}"
    values = ", ".join(f"{_value_of(lr, updates)} at {updates}" for updates in _PROBED)
    return f"lr {getattr(lr, '__qualname__', type(lr).__name__)} ({values})"


def _text_of_mask(mask: Mask | None) -> str:
    """Name the mask of a weight decay."""
    return "" if mask is None else f" of {getattr(mask, '__qualname__', type(mask).__name__)}"


def _value_of(lr: Callable[[Tensor], Tensor | float], updates: int) -> str:
    """Write a rate after so many updates, or the error that it raises: a table ends somewhere."""
    try:
        rate = lr(torch.tensor(updates, device="cpu"))
        return str(float(rate.detach() if isinstance(rate, Tensor) else rate))
    except Exception as error:
        return type(error).__name__


def _column(
    name: str, tree: Tree, treedef: Any, params: Sequence[Tensor], shape_of: Callable[..., Any]
) -> list[Tensor | None]:
    """Return the leaf of each parameter in a tree of the state; None where it has none."""
    try:
        column: list[Tensor | None] = treedef.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(f"{name} must have the structure of params: {error}") from error
    for p, leaf in zip(params, column, strict=True):
        shape = shape_of(p.shape) if differentiable(p.dtype) else None
        got = None if leaf is None else (tuple(leaf.shape), leaf.dtype, leaf.device)
        if got != (expected := None if shape is None else (tuple(shape), p.dtype, p.device)):
            raise ValueError(f"{name} must match the parameters: got {got}, expected {expected}")
    return column


def _groups(
    plan: LeafPlan, weight_decay: float, mask: Mask | None, params: Tree
) -> list[tuple[float, tuple[int, ...]]]:
    """Divide each group of a plan into leaves that decay and leaves that do not."""
    decaying = masked_leaves(True if mask is None else mask, Signature.of(params))
    groups = []
    for group in plan.groups:
        for decays, decay in ((True, weight_decay), (False, 0.0)):
            if alike := tuple(n for n in group if decaying[plan.trained[n]] is decays):
                groups.append((decay, alike))
    return groups


def _require_state(state: Any, names: tuple[str, ...]) -> None:
    """Raise ValueError for the state of another optimizer."""
    if not isinstance(state, dict) or state.keys() != {"updates", *names}:
        got = ", ".join(map(repr, state)) if isinstance(state, dict) else f"a {type(state).__name__}"
        wanted = ", ".join(map(repr, ("updates", *names)))
        raise ValueError(f"state: got {got or 'nothing'}, expected {wanted}; it is that of another optimizer")


def _rate(rate: Tensor | float, device: torch.device) -> Tensor | float:
    """Convert a learning rate for the kernels: those of an accelerator read float32 alone."""
    if not isinstance(rate, Tensor):
        return float(rate)
    return rate.to(device, torch.float32 if accelerates(device) else rate.dtype)


def zero_count(leaves: Sequence[Tensor]) -> Tensor:
    """Make a count of no updates, on the device of the leaves."""
    return torch.zeros((), dtype=torch.int64, device=leaves[0].device if leaves else None)
