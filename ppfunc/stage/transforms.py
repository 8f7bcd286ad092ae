"""Transform stages into stages, and losses into losses: maps along a leading axis, and tangents.

What they return is run by the same schedules, interpreter and transports as any stage. Maps give k models in
one pipeline, or parameters of its own to every sample. Tangents carry, beside every value of a stage, its
derivative along a direction; of that, products with second derivatives. Of a tree there is one per leaf that
moves, None for a leaf that stays.

The formulas of torch for tangents are not to be differentiated in reverse: some take a part of what they
compute for a constant, without an error (the mean in ``layer_norm``, the factors in ``linalg.solve``). The
gradient of a dual function is instead the dual of the function's gradient::

    jvp(fn)               (x, tx)         -> (y, ty)
    its pullback          (h, g)          -> (hx, gx),  where  gx, hx = jvp(pullback of fn, (x, g), (tx, h))
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from einops import einsum, rearrange, reduce, repeat
from torch.nn.attention import SDPBackend, sdpa_kernel

from ppfunc._checks import naming_arguments, require_type

from ._torch import TorchDispatchMode, jvp
from .layout import Boundary, declaring, distributed, layout_of, local, whole
from .operators import draws, effects_of, is_collective, written
from .program import TARGETED, WITHOUT_CARRY, Gradients, Leaves, Loss, Output, Received, Stage, without_aux
from .signature import differentiable, flatten
from .tree import filled, tree_flatten, tree_leaves, tree_map, tree_paths, tree_structure


def batched(
    fn: Callable[..., Any], args: Sequence[Any], axes: Sequence[bool], randomness: str = "error"
) -> Any:
    """Map ``fn`` over a leading axis of the marked arguments: :func:`torch.func.vmap` for any trees.

    >>> batched(lambda x, y: {"sum": x + y}, (torch.arange(3), torch.tensor(1)), (True, False))
    {'sum': tensor([1, 2, 3])}
    """
    leaves, treedef = tree_flatten(tuple(args))
    along = [0 if axis else None for axis, arg in zip(axes, args, strict=True) for _ in tree_leaves(arg)]
    returned: list[Any] = []  # leaves and structure

    def run(*inside: torch.Tensor) -> tuple[torch.Tensor, ...]:
        returned[:] = tree_flatten(fn(*treedef.unflatten(inside)), "y")
        return tuple(leaf for leaf in returned[0] if isinstance(leaf, torch.Tensor))

    if 0 not in along:
        raise ValueError(
            "got nothing with a leading axis to go along: a stage of an ensemble without parameters cannot be"
            " the first; join it with the next"
        )
    try:
        mapped = iter(torch.func.vmap(run, tuple(along), randomness=randomness)(*leaves))
    except RuntimeError as error:
        if "randomness flag" in str(error):
            error.add_note(
                'it draws random numbers: pass randomness="different" or "same" to pp.ensemble or'
                " pp.per_sample_grad"
            )
        raise
    leaves, treedef = returned
    return treedef.unflatten(next(mapped) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)


@naming_arguments
def ensemble(
    stages: Sequence[Stage], loss_fn: Loss, *, randomness: str = "error", carry: bool = False
) -> tuple[list[Stage], Loss]:
    """Make stages and a loss for k models of the same architecture that see the same batch.

    Every leaf of the parameters gets a leading axis k (``torch.func.stack_module_state``, or
    ``torch.stack``), and so does every leaf between stages. The losses are a tensor[k]. Their sum has
    the gradients of k separate trainings::

        step = pp.value_and_grad(*pp.ensemble(stages, loss_fn), schedule, transport, loss_shape=(k,))
        losses, grads = step(params, inputs, targets)

    All models see the same extras. An auxiliary loss becomes a tensor[k]. Metrics get the axis k.

    Args:
        stages: functions, one per stage of the model. The first has parameters, none has a state.
        loss_fn: ``loss(y, target) -> scalar``.
        randomness: random numbers of a stage that draws some: ``"different"`` for each model, or ``"same"``
            for all; by default such a stage raises.
        carry: whether the stages take a carry of slices; each model has its own, with a leading axis k.

    >>> stages, loss = ensemble([lambda w, x: w * x] * 2, lambda y, target: y - target)
    >>> hidden = stages[0](torch.tensor([1.0, 2.0]), torch.tensor(3.0))
    >>> loss(stages[1](torch.tensor([1.0, 10.0]), hidden), torch.tensor(1.0))
    tensor([ 2., 59.])
    """

    require_type("stages", stages, Sequence, "a list of functions, one per stage")

    def stage(fn: Stage, first: bool) -> Stage:
        @wraps(fn)
        def models(params: Any, x: Any, *extras: Any) -> Any:
            along = (True, not first, *(n < carry for n in range(len(extras))))
            out = batched(fn, (params, x, *extras), along, randomness)
            if isinstance(out, Output) and out.state is not None:
                raise ValueError(
                    "it returns a state, which an ensemble would need k of; take stages without state"
                )
            return out

        if not carry:
            vars(models)[WITHOUT_CARRY] = "ppfunc.ensemble(carry=False)"
        boundary = Boundary.of(fn)
        behind = boundary.map(_inward)
        return declaring(models, behind._replace(inputs=boundary.inputs) if first else behind)

    def losses(y: Any, target: Any) -> torch.Tensor:
        return batched(loss_fn, (y, target), (True, False), randomness)

    return [stage(fn, number == 0) for number, fn in enumerate(stages)], losses


def _inward(prefix: Any) -> Any:
    """Shift placements by a new axis in front of a tensor."""
    from torch.distributed.tensor import Shard

    return tree_map(
        lambda placement: Shard(placement.dim + (placement.dim >= 0)) if placement.is_shard() else placement,
        prefix,
    )


def per_sample(fn: Stage, *, randomness: str = "error", alone: bool = True, joined: bool = True) -> Stage:
    """Give every sample parameters of its own, so that gradients do not add up over samples.

    Equivalent to ``torch.func.vmap(fn)``, with every sample a batch of one: parameters (see
    :func:`for_samples`), ``x`` and the further arguments have a leading axis b.

    Args:
        randomness: the argument ``randomness`` of ``vmap``.
        alone: whether ``x`` and the further arguments have a batch axis, which becomes one sample long; else
            the stage gets what the one before it returned for that sample.
        joined: whether outputs have a batch axis, which becomes b long; else they get a further axis b.
    """

    def one(params: Any, *sample: Any) -> Any:
        with WithoutAsStrided():
            out = fn(params, *(_alone(sample) if alone else sample))
        if isinstance(out, Output) and (out.loss, out.metrics, out.state) != (None, None, None):
            raise ValueError(
                "it returns an auxiliary loss, metrics or a state, of which there are none per sample; return"
                " y and skips alone"
            )
        return out

    @wraps(fn)
    def stage(params: Any, x: Any, *extras: Any) -> Any:
        out = batched(one, (params, x, *extras), (True,) * (2 + len(extras)), randomness)
        return tree_map(_joined, out) if joined else out

    vars(stage)[WITHOUT_CARRY] = "ppfunc.per_sample_grad"
    return stage


class WithoutAsStrided(torch.overrides.TorchFunctionMode):
    """Refuse ``as_strided``: its gradient is wrong where all samples share the memory of a parameter."""

    looks_on = True  # no operator is another one by it

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.as_strided, torch.Tensor.as_strided):
            refuse_as_strided()
        return func(*args, **(kwargs or {}))


def refuse_as_strided() -> None:
    """Raise ValueError for ``as_strided`` in a stage with gradients of every sample."""
    raise ValueError(
        "it calls as_strided, whose gradient for every sample would be wrong; index, or use unfold, diagonal"
        " or flatten"
    )


def per_sample_loss(loss_fn: Loss, *, joined: bool = True) -> Loss:
    """Return ``loss(y, target) -> tensor[b]``, the loss of every sample, a batch of a single row."""

    def one(y: Any, target: Any) -> torch.Tensor:
        return without_aux(loss_fn)(_alone(y) if joined else y, _alone(target))

    def losses(y: Any, target: Any) -> torch.Tensor:
        return batched(one, (y, target), (True, True))

    return losses


def for_samples(params: Any, samples: int) -> Any:
    """Expand the parameters along a leading axis of samples: views, without a copy.

    >>> for_samples({"w": torch.zeros(3)}, 5)["w"].shape
    torch.Size([5, 3])
    """

    def copies(p: torch.Tensor) -> torch.Tensor:
        layout = layout_of(p)
        return distributed(
            repeat(local(p).detach(), "... -> b ...", b=samples), layout and layout.stacked(samples)
        )

    return tree_map(copies, params)


def square_norms(grads: Any) -> torch.Tensor:
    """Compute the squared norm of every per-sample gradient, over all leaves of ``grads``.

    Args:
        grads: a tree of per-sample gradients, [m, b, ...] each. Where the stages of a model are on several
            ranks, add up the norms of all of them before using them.

    Returns:
        tensor[m, b].

    >>> square_norms([torch.ones(2, 3, 4), 2 * torch.ones(2, 3)])
    tensor([[8., 8., 8.],
            [8., 8., 8.]])
    """
    floating = [g for g in tree_leaves(grads) if differentiable(g.dtype)]
    return torch.stack([whole(reduce(g.abs().square(), "m b ... -> m b", "sum")) for g in floating]).sum(0)


def clipped_sum(grads: Any, square_norms: torch.Tensor, max_norm: float) -> Any:
    """Sum per-sample gradients, each scaled down to a norm of ``max_norm`` at most.

    Args:
        grads: a tree of per-sample gradients, [m, b, ...] each.
        square_norms: squared norms of the gradients of all stages, [m, b].
        max_norm: the largest norm, positive.

    Returns:
        A tree like the parameters.

    Raises:
        ValueError: ``max_norm`` is not positive.

    References:
        Abadi et al., Deep learning with differential privacy, 2016, algorithm 1.

    >>> grads = {"w": torch.tensor([[3.0, 0.5]])}
    >>> clipped_sum(grads, square_norms(grads), 1.0)
    {'w': tensor(1.5000)}
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm: got {max_norm}, expected a positive number")
    scale = (max_norm / square_norms.sqrt()).clamp(max=1)

    def clip(gradient: torch.Tensor) -> torch.Tensor:
        if not differentiable(gradient.dtype):
            return gradient[0, 0]
        layout = layout_of(gradient)
        total = einsum(scale.to(gradient.dtype), local(gradient), "m b, m b ... -> ...")
        return distributed(total, layout and layout.without(2))

    return tree_map(clip, grads)


def _alone(sample: Any) -> Any:
    """Make a sample a batch of a single row."""
    return tree_map(lambda t: rearrange(t, "... -> 1 ..."), sample)


def _joined(t: torch.Tensor) -> torch.Tensor:
    """Join batches of single rows: [b, 1, ...] becomes [b, ...]."""
    if t.ndim < 2 or t.shape[1] != 1:
        raise ValueError(
            f"got an output of shape {list(t.shape[1:])} for a batch of one; a stage with per-sample"
            " gradients must return leaves with a leading batch axis"
        )
    return rearrange(t, "b 1 ... -> b ...")


# -- tangents


class Dual(NamedTuple):
    """Hold a value of a dual stage with its derivative.

    Args:
        value: a tree.
        tangent: a tree of its structure, with None for the leaves that do not move; or None.
    """

    value: Any
    tangent: Any


def dual(fn: Stage, *, slope_alone: bool = False, carry: bool = False) -> Stage:
    """Transform a stage into a stage on pairs of a value and its tangent: forward mode.

    Equivalent to, for any trees::

        def stage(params, x, *extras):
            (params, tangents), (x, tx) = params, x
            return torch.func.jvp(lambda p, a: fn(p, a, *extras), (params, x), (tangents, tx))

    A tangent has the structure of its value, with None for the leaves that do not move: integers,
    and whatever is held constant; None alone where nothing moves.

    Args:
        fn: a stage, ``fn(params, x, *extras) -> y``. All of its operators need a forward derivative;
            ``scaled_dot_product_attention`` runs unfused, since fused it has none.
        slope_alone: whether an auxiliary loss is differentiated in its derivative alone, as by
            :func:`dual_loss`.
        carry: whether the stage takes a carry of slices, which becomes a pair.

    Returns:
        ``stage((params, tangents), (x, tx), *extras) -> Dual(y, ty)``, a stage like any other. An auxiliary
        loss becomes a tensor[2], the loss and its derivative; skip connections become pairs. Where several
        edges lead to the stage, it takes a tuple of pairs.

    >>> dual(lambda w, x: w * x)((torch.tensor(2.0), torch.tensor(1.0)), (torch.tensor(3.0), None))
    Dual(value=tensor(6.), tangent=tensor(3.))
    """

    @wraps(fn, updated=())  # its parameters have other names
    def stage(params: Any, x: Any, *extras: Any) -> Any:
        pairs = [params, _unzipped(x), *(pair or (None, None) for pair in extras[:carry])]
        values, tangents = zip(*pairs, strict=True)
        y, ty = push(fn, values, tangents, ("params", "x", "carry")[: len(pairs)], extras[carry:])
        if not isinstance(y, Output):
            return Dual(y, ty)
        ty = ty or Output(None)
        slopes = ty.skips or {}
        skips = y.skips and {s: Dual(value, slopes.get(s)) for s, value in y.skips.items()}
        loss = None if y.loss is None else _pair(y.loss, ty.loss, slope_alone)
        given = None if y.carry is None else (y.carry, ty.carry)
        return Output(Dual(y.y, ty.y), loss, y.metrics, y.state, skips, given)

    if by := getattr(fn, WITHOUT_CARRY, "" if carry else "ppfunc.transforms.dual(carry=False)"):
        vars(stage)[WITHOUT_CARRY] = by
    vars(stage)[TARGETED] = getattr(fn, TARGETED, False)
    return declaring(stage, Boundary.of(fn).map(lambda prefix: Dual(prefix, prefix)))


def dual_loss(loss_fn: Loss, *, slope_alone: bool = False) -> Loss:
    """Return ``loss((y, ty), target) -> tensor[2]``: the loss, and its derivative along the direction.

    Args:
        loss_fn: ``loss(y, target) -> scalar``.
        slope_alone: whether the loss comes without a gradient. With ``g`` the gradient of the loss and ``H``
            its Hessian, dual stages compute the slope ``<g(params), tangents>``. The gradient of that with
            respect to ``params`` is ``H tangents``; with respect to ``tangents`` it is ``g``.

    References:
        Pearlmutter, Fast exact multiplication by the Hessian, 1994.

    >>> loss = dual_loss(lambda y, target: (y - target) ** 3, slope_alone=True)
    >>> loss((torch.tensor(3.0), torch.tensor(1.0)), torch.tensor(1.0))
    tensor([ 8., 12.])
    >>> torch.func.grad(lambda y: loss(y, torch.tensor(1.0)).sum())((torch.tensor(3.0), torch.tensor(1.0)))
    (tensor(12.), tensor(12.))
    """

    def loss(pair: Any, target: Any) -> torch.Tensor:
        y, ty = pair
        value, slope = push(without_aux(loss_fn), (y,), (ty,), ("y",), (target,))
        return _pair(value, slope, slope_alone)

    return loss


def _pair(value: torch.Tensor, slope: torch.Tensor | None, slope_alone: bool) -> torch.Tensor:
    value = value.detach() if slope_alone else value
    return torch.stack([value, torch.zeros_like(value) if slope is None else slope])


def _unzipped(x: Any) -> tuple[Any, Any]:
    """Split the input of a dual stage into its value and its tangent."""
    if isinstance(x, Received):
        value, tangent = _unzipped(x.x)
        # Of a source outside of the flow there is None.
        values, tangents = ({s: pair and pair[n] for s, pair in x.skips.items()} for n in (0, 1))
        return Received(value, values), Received(tangent, tangents)
    several = not isinstance(x, Dual) and all(isinstance(part, Dual) for part in x)
    return tuple(zip(*map(_unzipped, x), strict=True)) if several else x  # type: ignore[return-value]


def flatten_tangents(primal: Any, tangent: Any, name: str) -> Gradients:
    """Return the tangents of the leaves of ``primal``, in their order; errors call the tree ``name``.

    None in the place of a leaf, or of everything, stands for a tangent of zero. Integer leaves have no other.

    Raises:
        ValueError: another structure, shape or dtype, or a tangent of an integer leaf.
        TypeError: a leaf of ``tangent`` is neither a tensor nor None.

    >>> params = {"ids": torch.zeros(2).int(), "w": torch.zeros(())}
    >>> flatten_tangents(params, {"ids": None, "w": torch.ones(())}, "params")
    (None, tensor(1.))
    """
    leaves, treedef = flatten(primal, name)
    if tangent is None:
        return (None,) * len(leaves)
    try:
        tangents: list[Any] = treedef.flatten_up_to(tangent)
    except (ValueError, TypeError) as error:
        got = tree_structure(tangent)
        raise ValueError(
            f"tangent of {name}: got the structure {got}, expected {treedef}, with None for zero tangents"
        ) from error
    for path, leaf, value in zip(tree_paths(treedef, name), leaves, tangents, strict=True):
        if value is not None:
            _require_tangent(leaf, value, f"tangent of {path}")
    return tuple(tangents)


def _require_tangent(leaf: torch.Tensor, tangent: Any, name: str) -> None:
    if not isinstance(tangent, torch.Tensor):
        raise TypeError(
            f"{name}: got {tangent!r} of type {type(tangent).__name__}, expected a tensor, or None for zero"
        )
    if not differentiable(leaf.dtype):
        raise ValueError(
            f"{name}: got {tangent.dtype}{list(tangent.shape)}, expected None: {leaf.dtype} has no tangents"
        )
    if tangent.shape != leaf.shape or tangent.dtype != leaf.dtype or layout_of(tangent) != layout_of(leaf):
        got, want = (
            f"{t.dtype}{list(t.shape)}{f' {layout}' if (layout := layout_of(t)) else ''}"
            for t in (tangent, leaf)
        )
        raise ValueError(f"{name}: got {got}, expected {want}")


def push(
    fn: Callable[..., Any],
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
    names: tuple[str, ...],
    others: tuple[Any, ...] = (),
) -> tuple[Any, Any]:
    """Compute ``fn(*primals, *others)`` and its derivative along ``tangents``, of primals that are trees.

    The derivative has the structure of the value, with None at leaves that do not move. It is None if no leaf
    moves.
    """
    leaves, treedef = tree_flatten((*primals, *others))
    slopes = [
        t for p, v, name in zip(primals, tangents, names, strict=True) for t in flatten_tangents(p, v, name)
    ]
    slopes += [None] * (len(leaves) - len(slopes))
    if not any(slope is not None for slope in slopes):
        return fn(*primals, *others), None
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    structure: list[Any] = []

    def run(values: Sequence[torch.Tensor]) -> Leaves:
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no forward derivative
            y, y_def = flatten(fn(*treedef.unflatten(filled(leaves, tensors, values))), "y")
        structure[:] = [y_def]
        return y

    y, ty = _pushed(run, [leaves[i] for i in tensors], [slopes[i] for i in tensors])
    return structure[0].unflatten(y), structure[0].unflatten(ty)


# -- tangents whose gradients are the tangents of gradients

Flat = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
Tangents = Sequence[torch.Tensor | None]


def _pushed(fn: Flat, at: Sequence[torch.Tensor], along: Tangents) -> tuple[Any, Any]:
    """Compute ``fn(at)`` and its tangents, without tangents of integers.

    Their gradient is right. Its own gradient is that of torch's third derivatives: wrong for layer norm.
    """
    pairs = enumerate(zip(at, along, strict=True))
    wanted = [i for i, pair in pairs if any(t is not None and t.requires_grad for t in pair)]
    if not wanted:
        return _tangents(fn, at, along)
    results: Any = _Pushed.apply(_Repeated(fn), wanted, *at, *along)
    half = len(results) // 2
    return results[:half], results[half:]


def _tangents(fn: Flat, at: Sequence[torch.Tensor], along: Tangents) -> tuple[Any, Any]:
    moving = [i for i, slope in enumerate(along) if slope is not None]

    def moved(*values: torch.Tensor) -> tuple[Leaves, Sequence[torch.Tensor]]:
        y = fn(filled(at, moving, values))
        return tuple(t for t in y if differentiable(t.dtype)), y

    # Where it is off, some operators keep less for their backward, or compute that from constants.
    with torch.enable_grad():
        _, pushed, y = jvp(moved, *(tuple(values[i] for i in moving) for values in (at, along)), has_aux=True)
    rest = iter(pushed)
    return y, [next(rest) if differentiable(t.dtype) else None for t in y]


def _pullback(
    fn: Flat, at: Sequence[torch.Tensor], wanted: Sequence[int], of: Sequence[int] | None = None
) -> tuple[Sequence[torch.Tensor], Callable[..., Leaves]]:
    """Compute ``fn(at)``, and the pullback of the results ``of`` to the wanted arguments."""

    def some(*values: torch.Tensor) -> tuple[Leaves, Sequence[torch.Tensor]]:
        y = fn(filled(at, wanted, values))
        return tuple(y[i] for i in (range(len(y)) if of is None else of) if differentiable(y[i].dtype)), y

    pulled: Any = torch.func.vjp(some, *(at[i] for i in wanted), has_aux=True)
    return pulled[2], pulled[1]


class _Repeated(TorchDispatchMode):
    """Calls a function; from the second call on, repeats its draws and the results of its collectives."""

    supports_higher_order_operators = True

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn, self.notes, self.earlier = fn, list[Any](), iter(list[Any]())

    def __call__(self, *args: Any) -> Any:
        self.earlier = iter(self.notes[:])
        with self:
            return self.fn(*args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, functional = kwargs or {}, is_collective(func) and func.namespace != "c10d"
        if not (functional or (effects_of(func).seeded and draws(func, args, kwargs))):
            return func(*args, **kwargs)
        into = written(func, args, kwargs)
        if (note := next(self.earlier, None)) is None:
            result = func(*args, **kwargs)
            self.notes.append(tree_map(torch.clone, (None if result is args[0] else result, into)))
            return result
        result, values = tree_map(torch.clone, note)
        for tensor, value in zip(into, values, strict=True):
            tensor.copy_(value)
        return args[0] if result is None else result


class _Pushed(torch.autograd.Function):
    """Pushes tangents through a function. Its backward pushes them through the pullback of the function."""

    generate_vmap_rule = True

    @staticmethod
    def forward(fn: Flat, wanted: Sequence[int], *values: Any) -> Any:
        values, n = tree_map(torch.Tensor.detach, values), len(values) // 2
        y, ty = _tangents(lambda at: _pullback(fn, at, wanted)[0], values[:n], values[n:])
        return *y, *ty

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.fn, ctx.wanted, *values = inputs
        ctx.save_for_backward(*values)
        ctx.mark_non_differentiable(*(t for t in output if t is not None and not differentiable(t.dtype)))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        fn, wanted, values = ctx.fn, ctx.wanted, ctx.saved_tensors
        if not torch.is_grad_enabled():
            values, cotangents = (tree_map(torch.Tensor.detach, ts) for ts in (values, cotangents))
        n, half = len(values) // 2, len(cotangents) // 2
        pairs = list(zip(cotangents[:half], cotangents[half:], strict=True))
        of = [i for i, (h, g) in enumerate(pairs) if h is not None or g is not None]
        h = [pairs[i][0] for i in of]
        g = [torch.zeros_like(pairs[i][0]) if pairs[i][1] is None else pairs[i][1] for i in of]

        def pull(inside: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return _pullback(fn, inside[:n], wanted, of)[1](tuple(inside[n:]))

        gradients, moved = _pushed(pull, [*values[:n], *g], [*values[n:], *h])
        of_values, of_slopes = (filled([None] * n, wanted, found) for found in (moved, gradients))
        held = [None if slope is None else found for slope, found in zip(values[n:], of_slopes, strict=True)]
        return None, None, *of_values, *held
