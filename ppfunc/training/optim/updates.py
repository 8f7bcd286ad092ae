"""Make optimizers: element by element, by torch's fused kernels and by formulas of one leaf; and of whole
matrices.
"""

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from math import sqrt
from typing import Any, NamedTuple

import torch
from optree import PyTreeSpec
from torch import Tensor, nn

from ppfunc._checks import naming_arguments, require_counts, require_number, require_real, require_type
from ppfunc.runtime.lowering.ties import sharing
from ppfunc.runtime.values.arguments import Form, form_of, same_form
from ppfunc.stage._torch import FakeTensor
from ppfunc.stage.frozen import Mask, ParameterKind, masked_leaves
from ppfunc.stage.signature import Signature, differentiable, flatten
from ppfunc.stage.tree import filled, tree_flatten, tree_leaves, tree_map, tree_paths

from ._torch import copy_into_each, fused_adamw, fused_sgd, looked_through
from .optimizer import (
    Leaves,
    Optimizer,
    Tree,
    UpdateLeaves,
    divided,
    require_pair,
    selected,
    skipping,
    text_of,
)
from .rates import LearningRate, on_device, rate_after, text_of_rate


class LeafPlan(NamedTuple):
    """Describe the leaves of the trees of an update, for trees of one form.

    Args:
        structures: the structures of the parameters and of the state.
        forms: the forms of the parameters, their gradients and the state; empty for trees that a transform
            wraps.
        names: the names of the trees of the state, which are like the parameters.
        trained: the numbers of the parameters that have gradients; of these alone the state has leaves.
        decays: the weight decay of every parameter.
        groups: the decay, and positions in ``trained`` of leaves with that decay, one device and one real
            dtype.
        plain: the kernels can work on the tensors as they are.
    """

    structures: tuple[PyTreeSpec, PyTreeSpec]
    forms: tuple[Form, ...]
    names: tuple[str, ...]
    trained: tuple[int, ...]
    decays: Sequence[float]
    groups: tuple[tuple[float, tuple[int, ...]], ...]
    plain: bool


def plan_of(
    params: Tree, grads: Tree, state: Mapping[str, Tree], names: tuple[str, ...], decays: Sequence[float],
    *, guarded: bool = True,
) -> tuple[LeafPlan, list[Leaves]]:  # fmt: skip
    """Check that the trees of an update fit together; return their plan and their leaves.

    Args:
        state: the number of updates, then the trees of these names.
        decays: the weight decay of every parameter.
        guarded: note their forms.

    Raises:
        ValueError: gradients or state that do not match the parameters; names the leaf.
    """
    (wanted, structure), (gradients, of_grads) = flatten(params, "params"), flatten(grads, "grads")
    if of_grads != structure:  # in the same order of keys
        raise ValueError(f"grads must have the structure of params, got {of_grads} and expected {structure}")
    leaves_for("grads", grads, wanted, structure, all_have=True)
    columns = {name: leaves_for(name, state[name], wanted, structure, all_have=False) for name in names}
    state = {**state, **{name: structure.unflatten(each) for name, each in columns.items()}}  # in their order
    trained = tuple(n for n, p in enumerate(wanted) if differentiable(p.dtype))
    groups: dict[tuple[torch.device, torch.dtype, float], list[int]] = {}
    for k, n in enumerate(trained):
        p = wanted[n]
        dtype = p.real.dtype if p.dtype.is_complex else p.dtype
        groups.setdefault((p.device, dtype, decays[n]), []).append(k)
    every = chain(wanted, gradients, *columns.values())
    floating = (leaf for leaf in every if leaf is not None and differentiable(leaf.dtype))
    pairs = [(wanted, structure), (gradients, of_grads), flatten(state, "state")]
    plan = LeafPlan(
        (structure, pairs[2][1]),
        tuple(form_of(*pair) for pair in pairs) if guarded else (),
        names,
        trained,
        decays,
        tuple((decay, tuple(group)) for (_, _, decay), group in groups.items()),
        guarded and all(_is_dense(leaf) and not leaf.dtype.is_complex for leaf in floating),
    )
    return plan, [tuple(leaves) for leaves, _ in pairs]


def leaves_for(
    name: str, tree: Tree, params: Sequence[torch.Tensor], treedef: PyTreeSpec, *, all_have: bool
) -> list[Any]:
    """Return the leaf of each parameter in a tree like the parameters.

    Args:
        all_have: parameters that do not train have leaves too, as gradients; else they have None.

    Raises:
        ValueError: another structure, or a leaf that does not match its parameter.
    """
    try:
        column: list[Any] = treedef.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(f"{name} must have the structure of params: {error}") from error
    for n, (p, leaf) in enumerate(zip(params, column, strict=True)):
        got, expected = map(_described, (leaf, p if all_have or differentiable(p.dtype) else None))
        if got != expected:
            path = tree_paths(treedef, name)[n]
            raise ValueError(f"{path} must match its parameter: got {got}, expected {expected}")
    return column


def _described(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype}{list(leaf.shape)} on {leaf.device}"
    return "nothing" if leaf is None else f"a {type(leaf).__name__}"


def for_kernels(plan: LeafPlan, leaves: Leaves) -> Leaves:
    """View leaves in row-major memory in real dtypes: the kernels know no complex numbers."""
    if plan.plain:
        return leaves
    return tuple(torch.view_as_real(x) if x.dtype.is_complex else x for x in map(dense, leaves))


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


def require_own_memory(plan: LeafPlan, columns: Sequence[Leaves]) -> None:
    """Raise ValueError if two leaves share memory, which updates in place would change twice.

    Args:
        columns: the parameters that train, and each tree of the state.
    """
    every = [*chain(*columns)]
    if every and isinstance(every[0], FakeTensor):
        return  # without values, nor addresses
    if len(set(map(torch.Tensor.data_ptr, every))) == len(every):
        return
    every_path = (tree_paths(plan.structures[0], name) for name in ("params", *plan.names))
    paths = [of_tree[n] for of_tree in every_path for n in plan.trained]
    for one, other in sharing(every, [leaf.nbytes for leaf in every]):
        raise ValueError(
            f"{paths[one]} and {paths[other]} share their memory, so that they cannot both be updated in"
            " place; pass donate=False or make them separate tensors"
        )


Formula = Callable[..., tuple[Tensor, ...]]

Kernel = Callable[..., None]
"""``kernel(params, grads, *states, step, *, lr, weight_decay, found_inf)`` updates lists in place."""

Compute = Callable[..., list[Leaves]]
"""``compute(plan, params, grads, columns, found_inf, step, rate)``, of leaves that train: the new parameters,
then each tree of the state.
"""


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
        name, numbers: the parts of its text.
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

    def decays_of(params: Tree) -> list[float]:
        decaying = masked_leaves(True if mask is None else mask, Signature.of(params))
        return [weight_decay if decays else 0.0 for decays in decaying]

    made = _Updates(write, states, pure, compute, lr, decays_of, kernel is not None)
    init, update = naming_arguments(made.init), naming_arguments(made.update)
    return Optimizer(
        init, update, text=write, elementwise=True, rate=made.rate_since, on_leaves=(update, made.prepare)
    )


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
        trees = params, grads, {name: state[name] for name in ("updates", *self.names)}
        seen = looked_through((rate_after(self.rate, state["updates"]), *trees))
        with nullcontext() if seen else torch.no_grad():
            plan, (wanted, gradients, before) = self._plan(*trees, guarded=not seen)
            compute = self.pure if seen else self.compute
            new, after = self._run(compute, plan, gradients, before, wanted, found_inf)
        of_params, of_state = plan.structures
        state_after: Any = of_state.unflatten(after)
        return of_params.unflatten(new), state_after

    def prepare(self, state: dict[str, Tree], params: Tree) -> UpdateLeaves:
        _require_state(state, self.names)
        plan, _ = self._plan(params, params, state)
        return lambda grads, state, params, found_inf: self._run(
            self.compute, plan, tuple(map(dense, grads)), state, params, found_inf
        )

    def rate_since(self, state: dict[str, Tree], more: Tensor) -> Tensor | float:
        count: Tensor = state["updates"]
        return rate_after(self.rate, count + more.to(count) if callable(self.rate) else count)

    def _plan(
        self, params: Tree, grads: Tree, state: Tree, *, guarded: bool = True
    ) -> tuple[LeafPlan, list[Leaves]]:
        plan = self.last if guarded else None  # read once: another thread may set it
        if plan is not None:
            known: list[Any] = list(map(same_form, (params, grads, state), plan.forms))
            if None not in known:
                return plan, known
        decays = self.decays_of(params)
        plan, leaves = plan_of(params, grads, state, self.names, decays, guarded=guarded)
        self.last = plan if guarded else self.last
        return plan, leaves

    def _run(
        self, compute: Compute, plan: LeafPlan, grads: Leaves, state: Leaves, params: Leaves,
        found_inf: Tensor | None,
    ) -> tuple[Leaves, Leaves]:  # fmt: skip
        count, n = state[0], len(plan.trained)
        columns = [state[1 + k * n :][:n] for k in range(len(self.names))]
        old, gradients = params, grads
        if n < len(params):
            old, gradients = ([leaves[k] for k in plan.trained] for leaves in (params, grads))
        rate = rate_after(self.rate, count)
        new, *after = compute(plan, old, gradients, columns, found_inf, count + 1, rate)
        made = 1 if found_inf is None else (found_inf <= 0).to(count.device)
        new = new if n == len(params) else filled(params, plan.trained, new)
        return new, [count + made, *chain(*after)]


def _by_kernel(
    kernel: Kernel, donate: bool, plan: LeafPlan, params: Leaves, grads: Leaves, columns: Sequence[Leaves],
    found_inf: Tensor | None, step: Tensor, rate: Any,
) -> list[Leaves]:  # fmt: skip
    """Update group after group of leaves in place: in new memory, or in the memory of the arguments.

    Args:
        donate: see :func:`adamw`.
    """
    if donate:
        own = [c if plan.plain else tuple(map(dense, c)) for c in (params, *columns)]
        require_own_memory(plan, own)
        # The kernels do not count that they write.
        torch.autograd.graph.increment_version([*chain(*own)])
    else:
        own = [_copies(column) for column in (params, *columns)]
    every = [for_kernels(plan, column) for column in (own[0], grads, *own[1:])]
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
    return own


def by_formula(
    formula: Formula, plan: LeafPlan, params: Leaves, grads: Leaves, columns: Sequence[Leaves],
    found_inf: Tensor | None, step: Tensor, rate: Any,
) -> list[Leaves]:  # fmt: skip
    """Update leaf by leaf by operators that transforms see through."""
    step_as, rows = cache(step.to), []
    old = zip(values(params), *columns, strict=True)
    for n, g, row in zip(plan.trained, grads, old, strict=True):
        numbers = {"lr": on_device(rate, g.device), "weight_decay": plan.decays[n]}
        rows.append(selected(found_inf, row, applied(formula, row, g, step_as, **numbers)))
    return list(zip(*rows, strict=True)) if rows else [()] * (1 + len(columns))


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


@naming_arguments
def adamw(
    lr: LearningRate,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    mask: Mask | None = None,
    donate: bool = False,
) -> Optimizer:
    """Make an optimizer: Adam with decoupled weight decay.

    Equivalent to, for update number t = 1, 2, ...:
        mean = betas[0] * mean + (1 - betas[0]) * g
        square = betas[1] * square + (1 - betas[1]) * g**2
        p = p - lr * weight_decay * p
        p = p - lr * (mean / (1 - betas[0]**t)) / (sqrt(square / (1 - betas[1]**t)) + eps)

    Its state is a dictionary: ``updates``, the number of updates made, int64[], and ``mean`` and ``square``,
    both moments of every gradient, with None for leaves that are neither floating nor complex.

    Args:
        lr: the learning rate, or a function of the number of updates made before this one, int64[], such as
            :func:`warmup_cosine`. If it returns a tensor, the host reads no value.
        betas: decay of the two moments.
        eps: added to the denominator.
        weight_decay: share of each parameter removed per update, times ``lr``.
        mask: ``mask(params) -> tree of booleans``: True for the parameters of a stage, or the branches, that
            decay. It sees the names, ``ndim`` and ``dtype`` of parameters only: sizes and values may be those
            of a shard. It is called once for parameters of one form. By default all decay.
        donate: let an update write into its parameters and state: tensors in row-major memory are updated in
            place and returned, without a copy; the old state is gone, as in JAX. By default the arguments of
            an update stay as they are: it is
            a function, and earlier states can be used again, also after a step that failed once some of its
            state was updated. The copies about double the time of an update.

    Raises:
        ValueError, TypeError: not a number, or one that is negative or not finite; betas of 1 or more.

    References:
        Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2.
        The numbers are those of ``torch.optim.AdamW(..., fused=True)``.

    >>> import torch
    >>> optimizer = adamw(lr=0.5, weight_decay=0.0)
    >>> params = {"w": torch.tensor([1.0, 2.0])}
    >>> state = optimizer.init(params)
    >>> updated, state = optimizer.update({"w": torch.tensor([3.0, -3.0])}, state, params)
    >>> updated["w"], params["w"], state["updates"]
    (tensor([0.5000, 2.5000]), tensor([1., 2.]), tensor(1))
    >>> matrices = adamw(lr=0.5, mask=lambda params: {name: p.ndim > 1 for name, p in params.items()})
    """
    require_betas(betas)
    require_number("eps", eps)
    options: dict[str, Any] = {
        "beta1": betas[0],
        "beta2": betas[1],
        "eps": eps,
        "amsgrad": False,
        "maximize": False,
    }

    def kernel(
        params: list[Tensor],
        grads: list[Tensor],
        mean: list[Tensor],
        square: list[Tensor],
        step: Tensor,
        **numbers: Any,
    ) -> None:
        fused_adamw(params, grads, mean, square, [], [step] * len(params), **options, **numbers)

    numbers = f"betas ({betas[0]}, {betas[1]}), eps {eps}"
    pure = partial(by_formula, partial(_adamw, betas=(betas[0], betas[1]), eps=eps))
    return optimizer_of("adamw", numbers, pure, ("mean", "square"), lr, weight_decay, mask, kernel, donate)


@naming_arguments
def sgd(
    lr: LearningRate,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    *,
    nesterov: bool = False,
    mask: Mask | None = None,
    donate: bool = False,
) -> Optimizer:
    """Make an optimizer: stochastic gradient descent, with momentum if asked for.

    Equivalent to:
        g = g + weight_decay * p
        buffer = g at the first update, then momentum * buffer + g
        p = p - lr * (g + momentum * buffer if nesterov else buffer)

    Its state is a dictionary: ``updates``, the number of updates made, int64[], and with momentum the buffer
    of every gradient.

    Args:
        lr: the learning rate, as in :func:`adamw`.
        momentum: decay of the buffer; 0 keeps none.
        weight_decay: share of each parameter added to its gradient.
        nesterov: look ahead along the momentum.
        mask: the parameters that decay, as in :func:`adamw`.
        donate: whether an update may write into its arguments, as in :func:`adamw`.

    Raises:
        ValueError, TypeError: a number that is negative or not finite, or none; ``nesterov`` without
            momentum.

    >>> import torch
    >>> optimizer = sgd(lr=0.1)
    >>> params = [torch.tensor(1.0)]
    >>> optimizer.update([torch.tensor(2.0)], optimizer.init(params), params)[0]
    [tensor(0.8000)]
    """
    require_number("momentum", momentum, below=1.0)
    if nesterov and not momentum:
        raise ValueError("nesterov needs momentum > 0, got momentum=0; pass nesterov=False")
    numbers = f"momentum {momentum}, nesterov {nesterov}"
    formula = partial(_sgd, momentum=momentum, nesterov=nesterov)
    options: dict[str, Any] = {
        "momentum": momentum,
        "dampening": 0.0,
        "nesterov": nesterov,
        "maximize": False,
    }

    def kernel(params: list[Tensor], grads: list[Tensor], *rest: Any, **numbers: Any) -> None:
        # torch 2.13 mixes up the vectors of halves on the CPU.
        if params[0].dtype.itemsize < 4 and params[0].is_cpu:
            return written_into(formula, params, grads, *rest, **numbers)
        # A buffer of zeros becomes the gradient, as it does in torch at the first update.
        fused_sgd(params, grads, rest[0] if momentum else [], **options, is_first_step=False, **numbers)

    names = ("momentum",) if momentum else ()
    pure = partial(by_formula, formula)
    return optimizer_of("sgd", numbers, pure, names, lr, weight_decay, mask, kernel, donate)


def _adamw(
    p: Tensor, g: Tensor, mean: Tensor, square: Tensor, *,
    step: Tensor, lr: Tensor | float, weight_decay: float, betas: tuple[float, float], eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    mean = mean + (1 - betas[0]) * (g - mean)
    square = betas[1] * square + (1 - betas[1]) * g * g
    none = square == 0  # where the derivative of the root would be infinite
    root = torch.where(none, square, torch.where(none, 1.0, square).sqrt()) / (1 - betas[1] ** step).sqrt()
    direction = mean / (1 - betas[0] ** step) / (root + eps)
    return p - lr * weight_decay * p - lr * direction, mean, square


def _sgd(
    p: Tensor, g: Tensor, *buffers: Tensor,
    step: Tensor, lr: Tensor | float, weight_decay: float,
    momentum: float, nesterov: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    change = g + weight_decay * p
    if not buffers:
        return (p - lr * change,)
    total = momentum * buffers[0] + change
    return p - lr * (change + momentum * total if nesterov else total), total


# -- optimizers of whole matrices, of which a trainer's ranks may hold parts


OnMatrices = Callable[[Callable[[Tensor], Tensor], Tree], Tree]
"""``on_matrices(fn, tree)``: apply a function to whole matrices, of the last two dimensions, of which a rank
has the parts in a tree like the parameters; return its parts of the results, of the same shapes.
"""

_on_matrices: ContextVar[OnMatrices] = ContextVar("on_matrices", default=tree_map)


@contextmanager
def matrices_by(on_matrices: OnMatrices) -> Iterator[None]:
    """Let optimizers apply functions to matrices in this way; by default a tree has whole matrices."""
    token = _on_matrices.set(on_matrices)
    try:
        yield
    finally:
        _on_matrices.reset(token)


@naming_arguments
def muon(
    lr: LearningRate,
    momentum: float = 0.95,
    weight_decay: float = 0.1,
    *,
    nesterov: bool = True,
    ns_steps: int = 5,
    match_rms: bool = False,
    rest: Optimizer | None = None,
) -> Optimizer:
    """Make an optimizer of matrices: momentum with all its singular values near 1.

    Equivalent to, for every matrix of ``rows`` and ``columns``, and every matrix of a stack of three
    dimensions, such as the weights of experts::

        mean = momentum * mean + (1 - momentum) * g
        direction = newton_schulz((1 - momentum) * g + momentum * mean if nesterov else mean)
        p = p - lr * weight_decay * p - lr * sqrt(max(1, rows / columns)) * direction

    Its state is that of :func:`by_name` with the matrices as ``group0``, which has their ``mean``, the others
    as ``group1``. Where ranks hold parts of a matrix, over data or tensor parallel ranks, the mean lies as
    the matrix does. In a step the parts of a direction go to one rank, which iterates, and come back;
    matrices are dealt to these ranks by size.

    Args:
        lr: the learning rate, as in :func:`adamw`.
        momentum: decay of the mean.
        weight_decay: share of each matrix removed per update, times ``lr``.
        nesterov: look ahead along the momentum.
        ns_steps: steps of the iteration of Newton and Schulz, in bfloat16; in float64 for float64.
        match_rms: multiply by ``0.2 * sqrt(max(rows, columns))`` instead, which makes updates as long as
            those of :func:`adamw`, so that both can have one rate.
        rest: updates parameters that are no matrices. Embeddings and heads are matrices: give them to another
            optimizer with :func:`by_name`.

    Raises:
        ValueError, TypeError: numbers out of range. At ``init``: a parameter that is no real matrix, nor a
            stack of them, without ``rest``.

    References:
        Jordan et al., Muon, 2024; Liu et al., Muon is Scalable for LLM Training, 2025 (``match_rms``). The
        numbers are those of ``torch.optim.Muon``.

    >>> import torch
    >>> optimizer = muon(0.1, weight_decay=0.0)
    >>> params = {"w": torch.zeros(2, 2)}
    >>> optimizer.update({"w": torch.eye(2)}, optimizer.init(params), params)[0]["w"].round(decimals=1)
    tensor([[-0.1000,  0.0000],
            [ 0.0000, -0.1000]])
    """
    require_real("momentum", momentum, "; the optimizer of parameters that are no matrices is given as rest=")
    require_number("momentum", momentum, below=1.0)
    require_counts(ns_steps=ns_steps)
    if nesterov and not momentum:
        raise ValueError("nesterov needs momentum > 0, got momentum=0; pass nesterov=False")
    if rest is not None:
        require_pair("rest", rest)
    numbers = f"momentum {momentum}, nesterov {nesterov}, {ns_steps} steps, match_rms {match_rms}"
    of_matrix = partial(_direction, steps=ns_steps, match_rms=match_rms)
    pure = partial(_muon, momentum=momentum, nesterov=nesterov, of_matrix=of_matrix)
    matrices = optimizer_of("muon", numbers, pure, ("mean",), lr, weight_decay, None)

    def group_of(name: str, parameter: ParameterKind) -> int:
        if parameter.ndim in (2, 3) and parameter.dtype.is_floating_point:
            return 0
        if rest is None:
            raise ValueError(
                f"muon: got the parameter {name!r} of {parameter.ndim} dimensions in {parameter.dtype},"
                " expected real matrices, or stacks of them of 3 dimensions; pass an optimizer of the others,"
                " such as rest=adamw(1e-3)"
            )
        return 1

    if rest is None:
        return divided(group_of, {"matrices": matrices}, lambda: text_of(matrices))
    every = {"matrices": matrices, "rest": skipping(rest)}
    return divided(group_of, every, lambda: f"{text_of(matrices)}, the rest by {text_of(rest)}")


def _muon(
    plan: LeafPlan, params: Leaves, grads: Leaves, columns: Sequence[Leaves],
    found_inf: Tensor | None, step: Tensor, rate: Any, *,
    momentum: float, nesterov: bool, of_matrix: Callable[[Tensor], Tensor],
) -> list[Leaves]:  # fmt: skip
    """Update matrices by their momentum with all singular values near 1, in float32 or wider.

    All of it but ``of_matrix`` works element by element.
    """
    old, (before,) = values(params), columns
    wide = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in grads]
    means = [torch.lerp(mean.to(g.dtype), g, 1 - momentum) for mean, g in zip(before, wide, strict=True)]
    ahead = [torch.lerp(g, m, momentum) if nesterov else m for g, m in zip(wide, means, strict=True)]
    structure = plan.structures[0]
    tree = structure.unflatten(filled([None] * structure.num_leaves, plan.trained, ahead))
    directions, new = tree_leaves(_on_matrices.get()(of_matrix, tree)), list[Tensor]()
    for n, p, direction in zip(plan.trained, old, directions, strict=True):
        lr = on_device(rate, p.device)
        kept = p.to(direction.dtype) * (1 - lr * plan.decays[n])
        new.append((kept - lr * direction).to(p.dtype))
    after = [mean.to(m.dtype) for mean, m in zip(means, before, strict=True)]
    new, after = selected(found_inf, (old, [*before]), (new, after))
    return [new, after]


def _direction(matrix: Tensor, steps: int, match_rms: bool) -> Tensor:
    """Bring the singular values of a matrix, or of each matrix of a stack, near 1, and scale it."""
    rows, columns = matrix.shape[-2:]
    ratio = 0.2 * sqrt(max(rows, columns)) if match_rms else sqrt(max(1, rows / columns))
    return ratio * _orthogonal(matrix, steps).to(matrix.dtype)


def _orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """Bring the singular values of matrices near 1, by steps of Newton and Schulz.

    float64 stays; the other dtypes compute in bfloat16, which suffices, as torch does.
    """
    a, b, c = 3.4445, -4.775, 2.0315
    add_product = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    x = matrix if matrix.dtype == torch.float64 else matrix.bfloat16()
    wide = matrix.shape[-2] <= matrix.shape[-1]
    x = x if wide else x.mT
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT
