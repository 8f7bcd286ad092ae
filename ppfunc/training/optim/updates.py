"""Make optimizers of formulas of one leaf, and of fused kernels that compute the same in place.

A formula is ``formula(p, g, *states, step, lr, weight_decay) -> (p, *states)``, where ``step`` counts updates
from 1: a pure function of real tensors, in float32 or wider. A kernel runs where nobody looks through the
update. Under ``torch.func`` transforms and autograd the formula does.
"""

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ppfunc._checks import naming_arguments, require_number, require_type
from ppfunc.stage.frozen import Mask, masked_leaves
from ppfunc.stage.signature import Signature, differentiable
from ppfunc.stage.tree import filled, tree_flatten

from ._torch import looked_through
from .leaves import (
    LeafPlan,
    dense,
    for_kernels,
    leaves_of,
    owned,
    plan_of,
    require_own_memory,
    trained_leaves,
)
from .protocols import Leaves, Optimizer, Tree, UpdateLeaves, selected
from .rates import LearningRate, on_device, rate_after, text_of_rate

Formula = Callable[..., tuple[Tensor, ...]]

Kernel = Callable[..., None]
"""``kernel(params, grads, *states, step, *, lr, weight_decay, found_inf)`` updates lists in place."""

Compute = Callable[..., list[Leaves]]
"""``compute(plan, params, grads, states, found_inf, step, rate, written)``: new parameters, then states."""


def optimizer_of(
    name: str,
    numbers: str,
    pure: Compute,
    states: tuple[str, ...],
    lr: LearningRate,
    weight_decay: float,
    mask: Mask | None,
    kernel: Kernel | None = None,
    donate: bool = False,
) -> Optimizer:
    """Make an optimizer whose state counts its updates, and has trees that begin with zeros.

    Args:
        name, numbers: for its text.
        pure: computes the update by operators that transforms see through, such as :func:`by_formula`.
        states: the names of the trees, of leaves like the parameters.
        weight_decay, mask: see :func:`adamw`.
        kernel: computes the same, in place.
        donate: let the kernel write into its arguments.
    """
    require_number("weight_decay", weight_decay)
    require_type("mask", mask, Callable | None, "a function mask(params) -> tree of booleans")
    of_mask = "" if mask is None else f" of {getattr(mask, '__qualname__', type(mask).__name__)}"

    def write() -> str:
        return f"{name}({text_of_rate(lr)}, {numbers}, weight decay {weight_decay}{of_mask})"

    write()  # raises for a rate that is none
    compute = pure if kernel is None else partial(_by_kernel, kernel, donate)
    decays_of = partial(_decays_of, mask, weight_decay)
    made = _Updates(write, states, pure, compute, lr, decays_of, kernel is not None, donate)
    init, update = naming_arguments(made.init), naming_arguments(made.update)
    on_leaves = update, made.prepare
    return Optimizer(init, update, text=write, elementwise=True, rate=made.rate_since, on_leaves=on_leaves)


@dataclass(eq=False, slots=True)
class _Updates:
    """Make and update the state of :func:`optimizer_of`.

    Attributes:
        last: the plan of the last update: the next trees mostly have its forms.
    """

    write: Callable[[], str]
    names: tuple[str, ...]
    pure: Compute
    compute: Compute
    rate: LearningRate
    decays_of: Callable[[Tree], list[float]]
    complex: bool
    donate: bool
    last: LeafPlan | None = None

    def init(self, params: Tree) -> dict[str, Tree]:
        self.decays_of(params)  # raises for a mask of another form
        leaves, treedef = tree_flatten(params)
        if not self.complex and any(p.dtype.is_complex for p in leaves):
            raise TypeError(
                f"{self.write()}: got complex parameters, expected real ones; adamw and sgd take them"
            )
        zeros = lambda p: p.new_zeros(p.shape) if differentiable(p.dtype) else None  # noqa: E731
        count = torch.zeros((), dtype=torch.int64, device=leaves[0].device if leaves else None)
        return {"updates": count, **{name: treedef.unflatten(map(zeros, leaves)) for name in self.names}}

    def update(
        self, grads: Tree, state: dict[str, Tree], params: Tree, *, found_inf: Tensor | None = None
    ) -> tuple[Tree, dict[str, Tree]]:
        _require_state(state, self.names)
        if looked_through((rate_after(self.rate, state["updates"]), grads, state, params)):
            decays = self.decays_of(params)
            plan, leaves = plan_of(params, grads, state, self.names, decays, guarded=False)
            new, after = self._run(self.pure, plan, leaves, found_inf, [])
        else:
            with torch.no_grad():
                plan, leaves = self._plan(params, grads, state)
                new, after = self._run(self.compute, plan, leaves, found_inf, [])
        of_params, _, of_state = plan.structures
        state_after: Any = of_state.unflatten(after)
        return of_params.unflatten(new), state_after

    def prepare(self, state: dict[str, Tree], params: Tree) -> UpdateLeaves:
        _require_state(state, self.names)
        plan, _ = self._plan(params, params, state)
        of_params, _, of_state = plan.structures

        def update_leaves(
            grads: Leaves, state: Leaves, params: Leaves, found_inf: Tensor | None, written: list[Tensor]
        ) -> tuple[Leaves, Leaves]:
            nonlocal plan
            if not plan.plain:  # those that the last update has made may be
                tree = of_params.unflatten(params)
                whole: Any = of_state.unflatten(state)
                plan, _ = self._plan(tree, tree, whole)
            return self._run(
                self.compute, plan, (params, tuple(map(dense, grads)), state), found_inf, written
            )

        return update_leaves

    def rate_since(self, state: dict[str, Tree], more: Tensor) -> Tensor | float:
        count: Tensor = state["updates"]
        return rate_after(self.rate, count + more.to(count) if callable(self.rate) else count)

    def _plan(self, params: Tree, grads: Tree, state: dict[str, Tree]) -> tuple[LeafPlan, list[Leaves]]:
        plan = self.last  # read once: another thread may set it
        leaves = None if plan is None else leaves_of(plan, (params, grads, state))
        if plan is None or leaves is None:
            plan, leaves = plan_of(params, grads, state, self.names, self.decays_of(params))
            self.last = plan
        if self.donate:
            require_own_memory(plan, leaves)
        return plan, leaves

    def _run(
        self, compute: Compute, plan: LeafPlan, leaves: Sequence[Leaves], found_inf: Tensor | None,
        written: list[Tensor],
    ) -> tuple[Leaves, Leaves]:  # fmt: skip
        params, grads, state = leaves
        (count,) = state[plan.spans["updates"][0]]
        columns = [state[plan.spans[name][0]] for name in plan.columns]
        lr = rate_after(self.rate, count)
        new, *after = compute(plan, params, grads, columns, found_inf, count + 1, lr, written)
        made = 1 if found_inf is None else (found_inf <= 0).to(count.device)
        every = list(state)
        for name, column in zip(("updates", *plan.columns), ((count + made,), *after), strict=True):
            every[plan.spans[name][0]] = column
        return new, every


def _decays_of(mask: Mask | None, weight_decay: float, params: Tree) -> list[float]:
    decaying = masked_leaves(True if mask is None else mask, Signature.of(params))
    return [weight_decay if decays else 0.0 for decays in decaying]


def _by_kernel(
    kernel: Kernel, donate: bool, plan: LeafPlan, params: Leaves, grads: Leaves, columns: Sequence[Leaves],
    found_inf: Tensor | None, step: Tensor, rate: Any, written: list[Tensor],
) -> list[Leaves]:  # fmt: skip
    """Update in place, in new memory or in that of the arguments, one group of leaves after the other.

    Args:
        donate: see :func:`adamw`.
        written: gets the leaves of the arguments that are written into.

    Returns:
        The parameters, then each tree of the state.
    """
    own = owned(plan, (trained_leaves(plan, params), *columns), donate)
    if donate:
        written += [leaf for column in own for leaf in column]
        torch.autograd.graph.increment_version(written)  # the kernels do not count that they write
    every = [for_kernels(plan, c) for c in (own[0], trained_leaves(plan, grads), *own[1:])]
    for decay, group in plan.groups:
        chosen = [column if len(group) == len(column) else [column[n] for n in group] for column in every]
        device = chosen[0][0].device
        kernel(
            *chosen,
            step.float().to(device),
            lr=on_device(rate, device),
            weight_decay=decay,
            found_inf=None if found_inf is None else found_inf.to(device, torch.float32),
        )
    if len(own[0]) == len(params):
        return own
    return [filled(params, plan.trained, own[0]), *own[1:]]


def by_formula(
    formula: Formula, plan: LeafPlan, params: Leaves, grads: Leaves, columns: Sequence[Leaves],
    found_inf: Tensor | None, step: Tensor, rate: Any, written: list[Tensor],
) -> list[Leaves]:  # fmt: skip
    """Update leaf by leaf by operators that transforms see through; return the parameters, then the state."""
    step_as, rows = cache(step.to), []
    old = zip(values(trained_leaves(plan, params)), *columns, strict=True)
    for n, g, row in zip(plan.trained, trained_leaves(plan, grads), old, strict=True):
        numbers = {"lr": on_device(rate, g.device), "weight_decay": plan.decays[n]}
        rows.append(selected(found_inf, row, applied(formula, row, g, step_as, **numbers)))
    new, *after = zip(*rows, strict=True) if rows else [()] * (1 + len(columns))
    return [filled(params, plan.trained, new), *after]


def values(leaves: Leaves) -> list[Tensor]:
    """Return parameters of modules as values, without their history; other leaves as they are."""
    return [p.detach() if isinstance(p, nn.Parameter) else p for p in leaves]


def applied(
    formula: Formula,
    old: tuple[Tensor, ...],
    g: Tensor,
    step_as: Callable[[torch.device, torch.dtype], Tensor],
    **numbers: Any,
) -> tuple[Tensor, ...]:
    """Apply a formula to a leaf and its states, complex numbers as pairs, in float32 or wider.

    Args:
        step_as: converts the number of this update.
    """
    wide = torch.promote_types(g.real.dtype if g.dtype.is_complex else g.dtype, torch.float32)

    def real(leaf: Tensor) -> Tensor:
        return (torch.view_as_real(leaf.resolve_conj()) if leaf.dtype.is_complex else leaf).to(wide)

    def like(was: Tensor, leaf: Tensor) -> Tensor:
        return (torch.view_as_complex(leaf) if was.dtype.is_complex else leaf).to(was.dtype)

    p, *states = map(real, old)
    new = formula(p, real(g), *states, step=step_as(g.device, wide), **numbers)
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
    step_as = cache(step.to)
    for old, g in zip(zip(params, *columns, strict=True), grads, strict=True):
        for one, new in zip(
            old, selected(found_inf, old, applied(formula, old, g, step_as, **numbers)), strict=True
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


def _require_state(state: Any, names: tuple[str, ...]) -> None:
    if not isinstance(state, dict) or state.keys() != {"updates", *names}:
        got = ", ".join(map(repr, state)) if isinstance(state, dict) else f"a {type(state).__name__}"
        wanted = ", ".join(map(repr, ("updates", *names)))
        raise ValueError(f"state: got {got or 'nothing'}, expected {wanted}; it is that of another optimizer")
