"""Make optimizers of formulas of one leaf, and of fused kernels that compute the same in place.

A formula is ``formula(p, g, *states, step, lr, weight_decay) -> (p, *states)``, where ``step`` counts updates
from 1: a pure function of real tensors, in float32 or wider. A kernel runs where nobody looks through the
update. Under ``torch.func`` transforms and autograd the formula does.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
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

from .._torch import looked_through
from ..checks import require_number
from .leaves import (
    LeafPlan,
    for_kernels,
    leaves_of,
    owned,
    plan_of,
    rebuilt,
    require_match,
    state_column,
    trained_leaves,
)
from .protocols import Optimizer, Tree, selected

LearningRate = float | Callable[[Any], Tensor | float]
"""Number, or function of the number of updates made before, such as :func:`warmup_cosine`, or of a state."""

Formula = Callable[..., tuple[Tensor | None, ...]]

Kernel = Callable[..., None]
"""``kernel(params, grads, *states, step, *, lr, weight_decay, found_inf)`` updates lists in place."""

Shapes = Mapping[str, Callable[[torch.Size], Sequence[int] | None]]
"""By the name of a tree of the state: from the shape of a parameter to that of its leaf, None for none."""

Decays = Callable[[Tree], list[float]]
"""From parameters to the weight decay of each."""

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

    write()  # raises for a rate that is none
    shapes = states if isinstance(states, Mapping) else dict.fromkeys(states, tuple)
    by_formula = partial(_by_formula, formula, shapes)
    by_kernel = by_formula if kernel is None else _by_kernel(kernel, tuple(shapes), donate)
    rate, decays_of = _Rate(lr), partial(_decays_of, mask, weight_decay)

    @naming_arguments
    def init(params: Tree) -> dict[str, Tree]:
        decays_of(params)  # raises for a mask of another form
        leaves, treedef = tree_flatten(params)
        if kernel is None and any(p.dtype.is_complex for p in leaves):
            raise TypeError(f"{write()}: got complex parameters, expected real ones; adamw and sgd take them")
        trees = {name: treedef.unflatten(_zeros(p, of) for p in leaves) for name, of in shapes.items()}
        count = zero_count(leaves)
        return {"updates": count, **trees, **rate.init(count.device)}

    @naming_arguments
    def update(
        grads: Tree, state: dict[str, Tree], params: Tree, *, found_inf: Tensor | None = None
    ) -> tuple[Tree, dict[str, Tree]]:
        _require_state(state, (*shapes, *(["rate"] if rate.has_state else [])))
        count, trees = state["updates"], {name: state[name] for name in shapes}
        lr = rate.at(state, count)
        seen = looked_through((lr, grads, state, params))
        with nullcontext() if seen else torch.no_grad():
            compute = by_formula if seen else by_kernel
            new, *after = compute(decays_of, grads, trees, params, found_inf, count + 1, lr)
            made = 1 if found_inf is None else (found_inf <= 0).to(count.device)
            return new, {**state, "updates": count + made, **dict(zip(shapes, after, strict=True))}

    elementwise, observe = kernel is not None, rate.observe if rate.observes else None
    return Optimizer(init, update, text=write, elementwise=elementwise, rate=rate.since, observe=observe)


class _Rate:
    """Reads a rate from the state of an optimizer; one that depends on metrics has a state there."""

    def __init__(self, rate: LearningRate) -> None:
        self._rate: Any = rate
        self.has_state = getattr(rate, "init", None) is not None
        self.observes = getattr(rate, "observe", None) is not None

    def init(self, device: torch.device) -> dict[str, Tree]:
        return {"rate": self._rate.init(device)} if self.has_state else {}

    def at(self, state: dict[str, Tree], updates: Tensor) -> Tensor | float:
        """Return the rate after so many updates."""
        rate, argument = self._rate, state["rate"] if self.has_state else updates
        return rate(argument) if callable(rate) else rate

    def since(self, state: dict[str, Tree], more: Tensor) -> Tensor | float:
        return self.at(state, state["updates"] + more.to(state["updates"]))

    def observe(self, state: dict[str, Tree], metric: Tensor) -> dict[str, Tree]:
        return {**state, "rate": self._rate.observe(state["rate"], metric)}


def _decays_of(mask: Mask | None, weight_decay: float, params: Tree) -> list[float]:
    decaying = masked_leaves(True if mask is None else mask, Signature.of(params))
    return [weight_decay if decays else 0.0 for decays in decaying]


def _by_kernel(kernel: Kernel, names: Sequence[str], donate: bool) -> Callable[..., list[Tree]]:
    """Make a function like :func:`_by_formula` that updates in place, in new memory or in that of its
    arguments, one group of leaves after the other.

    Args:
        names: of the trees of the state.
        donate: see :func:`adamw`.
    """
    last: LeafPlan | None = None  # of the last update: the next trees mostly have its forms

    def update(
        decays_of: Decays, grads: Tree, state: Mapping[str, Tree], params: Tree, found_inf: Tensor | None,
        step: Tensor, rate: Any,
    ) -> list[Tree]:  # fmt: skip
        nonlocal last
        plan = last  # read once: another thread may set it
        leaves = None if plan is None else leaves_of(plan, (params, grads, *state.values()))
        if plan is None or leaves is None:
            plan, leaves = plan_of(params, grads, state, decays_of(params))
            last = plan
        columns = owned(plan, ("params", *names), (leaves[0], *leaves[2:]), donate)
        if donate:  # the kernels do not count that they write
            increment_version([leaf for column in columns for leaf in column])
        every = [for_kernels(plan, c) for c in (columns[0], trained_leaves(plan, leaves[1]), *columns[1:])]
        for decay, group in plan.groups:
            chosen = [column if len(group) == len(column) else [column[n] for n in group] for column in every]
            device = chosen[0][0].device
            kernel(
                *chosen,
                step.float().to(device),
                lr=_rate(rate, device),
                weight_decay=decay,
                found_inf=None if found_inf is None else found_inf.to(device, torch.float32),
            )
        return rebuilt(plan, leaves[0], columns)

    return update


def _by_formula(
    formula: Formula, shapes: Shapes, decays_of: Decays, grads: Tree, state: Mapping[str, Tree], params: Tree,
    found_inf: Tensor | None, step: Tensor, rate: Any,
) -> list[Tree]:  # fmt: skip
    """Update leaf by leaf by operators that transforms see through; return the parameters, then the state."""
    leaves, treedef = flatten(params, "params")
    gradients, structure = flatten(grads, "grads")
    require_match("grads", gradients, structure, leaves, treedef)
    columns = [state_column(name, state[name], leaves, treedef, of) for name, of in shapes.items()]
    rows = []
    for p, g, decay, *each in zip(leaves, gradients, decays_of(params), *columns, strict=True):
        old = (p.detach() if isinstance(p, nn.Parameter) else p, *each)  # a module's are values
        if differentiable(p.dtype):
            new = applied(formula, old, g, step, lr=_rate(rate, p.device), weight_decay=decay)
            old = selected(found_inf, old, new)
        rows.append(old)
    return list(map(treedef.unflatten, zip(*rows, strict=True) if rows else [()] * (1 + len(shapes))))


def _zeros(p: Tensor, shape_of: Callable[[torch.Size], Sequence[int] | None]) -> Tensor | None:
    """Make the first leaf of a state for a parameter, None where it has none."""
    shape = shape_of(p.shape) if differentiable(p.dtype) else None
    return None if shape is None else p.new_zeros(shape)


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
    if text := getattr(lr, "text", None):
        return f"lr {text}"
    if not callable(lr):
        require_number(
            "lr",
            lr,
            mend=", or a function of the number of updates, such as ppfunc.optim.warmup_cosine;"
            " an optimizer is given no parameters",
        )
        return f"lr {lr}"
    values = {updates: _value_of(lr, updates) for updates in _PROBED}
    if isinstance(values[0], float):
        require_number("lr(0)", values[0])
    texts = ", ".join(f"{value} at {updates}" for updates, value in values.items())
    return f"lr {getattr(lr, '__qualname__', type(lr).__name__)} ({texts})"


def _text_of_mask(mask: Mask | None) -> str:
    """Name the mask of a weight decay."""
    return "" if mask is None else f" of {getattr(mask, '__qualname__', type(mask).__name__)}"


def _value_of(lr: Callable[[Tensor], Tensor | float], updates: int) -> float | str:
    """Compute a rate after so many updates, or name the error that it raises: a table ends somewhere."""
    try:
        rate = lr(torch.tensor(updates, device="cpu"))
        return float(rate.detach() if isinstance(rate, Tensor) else rate)
    except Exception as error:
        return type(error).__name__


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
