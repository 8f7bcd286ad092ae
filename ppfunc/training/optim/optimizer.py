"""Define an optimizer, a pair of pure functions, and make optimizers of others."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch
from optree import PyTreeSpec

from ppfunc._checks import naming_arguments, naming_attributes, require_number, require_type, shown
from ppfunc.stage._torch import versions
from ppfunc.stage.frozen import ParameterKind
from ppfunc.stage.signature import differentiable, first_match, names_in, note_patterns, require_reachable
from ppfunc.stage.tree import tree_flatten, tree_leaves, tree_map, tree_paths, tree_structure

from ._torch import looked_through
from .norms import Clip

Tree = Any


Update = Callable[..., tuple[Tree, Tree]]

Leaves = Sequence[torch.Tensor]

UpdateLeaves = Callable[[Leaves, Leaves, Leaves, torch.Tensor | None], tuple[Leaves, Leaves]]
"""``update(grads, state, params, found_inf) -> (params, state)``, of leaves of trees of known forms."""


@naming_arguments
@naming_attributes
class Optimizer(NamedTuple):
    """Pair the functions of an optimizer; any such pair serves as an optimizer.

    Unlike in optax, ``update`` returns the new parameters, not differences to add to them: torch's fused
    kernels compute both at once.

    Args:
        init: ``init(params) -> state``, a tree of tensors in dictionaries, lists and tuples.
        update: ``update(grads, state, params, *, found_inf=None) -> (params, state)``, where ``grads`` has
            the structure, shapes, dtypes and devices of ``params``. Leaves that are neither floating nor
            complex are returned unchanged. Where ``found_inf`` float32[] is 1, nothing changes, and no value
            is read by the host to know it. The trainer updates one stage, or shards of its leaves, at a time.
        clipped: the clip and the optimizer that :func:`chain` was given. A trainer clips by the norm of all
            stages, then runs that optimizer.
        text: the name and numbers, which ranks that train together compare in every step, or a function that
            writes them; by default the name of ``update``.
        elementwise: an update works element by element, whole matrices of :func:`muon` aside. Others are
            refused by a trainer that cuts parameters over ranks.
        rate: ``rate(state, since) -> lr``, for the metrics of a trainer: the learning rate of the update that
            is made ``since`` updates, int64[], after this state; of several groups a dictionary.
        on_leaves: the ``update`` that this replaces, and ``prepare(state, params)``, which checks trees once
            and makes the function that updates their leaves in the steps of a trainer. Beside another
            ``update`` it is not used.
        patterns: ``patterns(params) -> {text: takes}``: whether each pattern of names takes a parameter.

    The optimizers of this package can be differentiated and mapped by ``torch.func`` and autograd, through
    the gradients, the state, the rate, and parameters other than ``torch.nn.Parameter``, which count as
    values.
    ``torch.func.vmap`` takes no trees with None, which the states of leaves that are not updated are.
    """

    init: Callable[[Tree], Tree]
    update: Update
    clipped: "tuple[Clip, Optimizer] | None" = None
    text: str | Callable[[], str] = ""
    elementwise: bool = False
    rate: Callable[[Tree, torch.Tensor], Any] | None = None
    on_leaves: tuple[Update, Callable[[Tree, Tree], UpdateLeaves]] | None = None
    patterns: Callable[[Tree], dict[str, bool]] = lambda params: {}

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            f"optimizer.{name} = {shown(value)}: an optimizer is a value; make another one, such as"
            " ppfunc.optim.adamw(1e-4), or give a rate that is a function of the number of updates, such as"
            " ppfunc.optim.linear(1e-3, 0.0, steps=1000)"
        )


def require_pair(name: str, pair: Any) -> None:
    """Raise TypeError for an object without the functions ``init`` and ``update``."""
    if not callable(getattr(pair, "init", None)) or not callable(getattr(pair, "update", None)):
        raise TypeError(
            f"{name}: got {shown(pair)}, expected init and update; make an optimizer, such as"
            " ppfunc.optim.adamw(1e-3)"
        )


def unclipped(name: str, optimizer: Any, how: str) -> Optimizer:
    """Return an optimizer whose update takes ``found_inf``; raise ValueError for an optimizer that clips."""
    require_pair(name, optimizer)
    if getattr(optimizer, "clipped", None) is not None:
        raise ValueError(f"{name}: got {text_of(optimizer)}, which clips {how}")
    return skipping(optimizer)


def text_of(thing: Any) -> str:
    """Write the name of an optimizer or a transform, with its numbers if it has ``text``."""
    text = getattr(thing, "text", "")
    written: str = text() if callable(text) else text
    return written or getattr(getattr(thing, "update", thing), "__qualname__", type(thing).__name__)


def skipping(optimizer: Optimizer) -> Optimizer:
    """Give the update of an optimizer the argument ``found_inf``, if it lacks it.

    Equivalent to: update; where ``found_inf`` is 1, take the old parameters and state.
    """
    if not isinstance(optimizer, Optimizer):
        optimizer = Optimizer(optimizer.init, optimizer.update)
    if "found_inf" in inspect.signature(optimizer.update).parameters:
        return optimizer
    plain = optimizer.update

    def update(
        grads: Tree,
        state: Tree,
        params: Tree,
        *,
        found_inf: torch.Tensor | None = None,
    ) -> tuple[Tree, Tree]:
        leaves = tree_leaves((params, state)) if found_inf is not None else []
        before = versions(leaves)
        new = plain(grads, state, params)
        if versions(leaves) != before:
            raise ValueError(
                "the optimizer has written into its arguments, which are still needed where gradients"
                " overflow; take copies, or let its update take found_inf by name, and change nothing where"
                " it is 1"
            )
        alike = tree_structure(new) == tree_structure((params, state))
        return selected(found_inf, (params, state), new) if alike else new  # which the caller refuses

    update.__qualname__ = getattr(plain, "__qualname__", "update")
    return optimizer._replace(update=update)


def selected(found_inf: torch.Tensor | None, old: Tree, new: Tree) -> Tree:
    """Select ``old`` where ``found_inf`` is 1, else ``new``, without reading it.

    A new leaf of another form is taken, for the caller to refuse: it would be broadcast, or promoted.
    """
    if found_inf is None:
        return new

    def of_leaf(a: torch.Tensor, b: Any) -> Any:
        if a is b or not isinstance(b, torch.Tensor) or (a.dtype, a.shape) != (b.dtype, b.shape):
            return b
        return torch.where((found_inf > 0).to(a.device), a, b)

    return tree_map(of_leaf, old, new)


@naming_arguments
def from_updates(transform: Any) -> Optimizer:
    """Make an optimizer from a transform in optax's form, as TorchOpt's, whose update returns differences.

    Equivalent to:
        updates, state = transform.update(grads, state, params=params)
        params = params + updates

    The transform sees the parameters of one stage at a time. Clip by the norm of the whole model with
    :func:`clip_by_global_norm`.

    Args:
        transform: any object with ``init(params)`` and ``update(grads, state, params=params)``, all of whose
            state is tensors.

    Raises:
        TypeError: ``transform`` lacks these functions, or a leaf of its state is no tensor.
        ValueError: updates that do not have the structure of the parameters.

    References:
        DeepMind, optax; Ren et al., TorchOpt: An Efficient Library for Differentiable Optimization, 2023.

    >>> import torch
    >>> halved = lambda grads, state, params: ([-0.5 * g for g in grads], state)
    >>> optimizer = from_updates(Optimizer(lambda params: (), halved))
    >>> optimizer.update([torch.tensor(2.0)], optimizer.init([]), [torch.tensor(1.0)])[0]
    [tensor(0.)]
    """
    require_pair("transform", transform)
    # TorchOpt writes into the gradients by default.
    keywords = {"inplace": False} if "inplace" in inspect.signature(transform.update).parameters else {}

    def init(params: Tree) -> Tree:
        state = transform.init(params)
        leaves, structure = tree_flatten(state)
        for leaf, path in zip(leaves, tree_paths(structure, "state"), strict=True):
            require_type(path, leaf, torch.Tensor, "a tensor, which can be saved, moved and skipped")
        return state

    def update(
        grads: Tree,
        state: Tree,
        params: Tree,
        *,
        found_inf: torch.Tensor | None = None,
    ) -> tuple[Tree, Tree]:
        wanted, structure = tree_flatten(params)
        with nullcontext() if looked_through((grads, state, params)) else torch.no_grad():
            updates, after = transform.update(grads, state, params=params, **keywords)
            got, got_structure = tree_flatten(updates)
            if got_structure != structure:
                raise ValueError(
                    f"updates must have the structure of params, got {got_structure} and expected {structure}"
                )
            new = structure.unflatten(
                (p + change).to(p.dtype) if differentiable(p.dtype) else p
                for p, change in zip(wanted, got, strict=True)
            )
            return selected(found_inf, (params, state), (new, after))

    return Optimizer(init, update, text=lambda: f"from_updates({text_of(transform)})")


@naming_arguments
def chain(clip: Clip, optimizer: Optimizer | None = None) -> Optimizer:
    """Make an optimizer that clips gradients first. Its state is that of ``optimizer``.

    A trainer clips by the norm of all stages and ranks. Without a trainer, the norm is that of the gradients
    of the call.

    Raises:
        TypeError: not a clip, or not an optimizer.
        ValueError: the optimizer clips already.

    >>> import torch
    >>> from ppfunc.training.optim import clip_by_global_norm, sgd
    >>> optimizer = chain(clip_by_global_norm(1.0), sgd(lr=1.0))
    >>> params = [torch.tensor([0.0, 0.0])]
    >>> optimizer.update([torch.tensor([3.0, 4.0])], optimizer.init(params), params)[0]
    [tensor([-0.6000, -0.8000])]
    """
    require_type(
        "clip", clip, Clip, "a clip, then an optimizer: chain(clip_by_global_norm(1.0), adamw(1e-3))"
    )
    ending = unclipped("optimizer", optimizer, "already; expected one clip")

    def update(
        grads: Tree, state: Tree, params: Tree, *, found_inf: torch.Tensor | None = None
    ) -> tuple[Tree, Tree]:
        return ending.update(clip(grads), state, params, found_inf=found_inf)

    def write() -> str:
        return f"chain({clip.text}, {text_of(ending)})"

    return ending._replace(update=update, clipped=(clip, ending), text=write, elementwise=False)


@naming_arguments
def ema(optimizer: Optimizer, decay: float = 0.999) -> Optimizer:
    """Make an optimizer that also keeps an exponential moving average of the parameters.

    Equivalent to, after every update that is not skipped:
        average = decay * average + (1 - decay) * p

    Its state is a dictionary: ``average``, which begins with the parameters, in float32 or wider, and
    ``inner``, the state of ``optimizer``. To evaluate the average, give a trainer
    ``state._replace(params={s: own["average"] for s, own in state.optimizer.items()})``; where
    ``shard="optimizer"`` cuts it, gather its leaves by ``full_tensor()`` first.

    Args:
        decay: less than 1.

    Raises:
        ValueError, TypeError: another decay; not an optimizer, or one that clips: write
            ``chain(clip, ema(...))``.

    >>> from ppfunc.training.optim import sgd
    >>> optimizer, params = ema(sgd(1.0), decay=0.5), [torch.tensor(4.0)]
    >>> _, state = optimizer.update([torch.tensor(2.0)], optimizer.init(params), params)
    >>> state["average"]
    [tensor(3.)]
    """
    require_number("decay", decay, below=1.0)
    inner = unclipped("optimizer", optimizer, "inside; expected the clip around all, chain(clip, ema(...))")

    def init(params: Tree) -> dict[str, Tree]:
        def wide(p: torch.Tensor) -> torch.Tensor:  # in which small changes are not lost
            wider = torch.promote_types(p.dtype, torch.float32)
            return p.detach().to(wider).clone() if differentiable(p.dtype) else p

        return {"average": tree_map(wide, params), "inner": inner.init(params)}

    def towards(old: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return old + (1 - decay) * (p - old) if differentiable(old.dtype) else old

    def update(
        grads: Tree, state: dict[str, Tree], params: Tree, *, found_inf: torch.Tensor | None = None
    ) -> tuple[Tree, dict[str, Tree]]:
        with nullcontext() if looked_through((grads, state, params)) else torch.no_grad():
            new, after = inner.update(grads, state["inner"], params, found_inf=found_inf)
            average = selected(found_inf, state["average"], tree_map(towards, state["average"], new))
            return new, {"average": average, "inner": after}

    rate = inner.rate
    return Optimizer(
        init,
        update,
        text=lambda: f"ema {decay} of {text_of(inner)}",
        elementwise=inner.elementwise,
        rate=None if rate is None else lambda state, since: rate(state["inner"], since),
        patterns=inner.patterns,
    )


@naming_arguments
def by_name(groups: Mapping[str, Optimizer]) -> Optimizer:
    """Make an optimizer of several: each updates the parameters of a group.

    A parameter is named in its stage by the keys on the way to it, joined by dots: ``h.3.attn.weight``. Its
    state is a dictionary with that of each group in order, ``group0``, ``group1``, ..., whose trees have
    None in the place of parameters of other groups.

    Args:
        groups: optimizers by patterns of names, as of a shell, alternatives divided by ``|``. The first
            that matches counts.

    Raises:
        TypeError, ValueError: not optimizers; one that clips: write ``chain(clip, by_name(...))``; a pattern
            that an earlier one hides. At ``init``: a parameter of no group. In the first step of a trainer: a
            pattern other than ``"*"`` that takes no parameter of any rank which trains, or an
            alternative that matches none.

    >>> import torch
    >>> from ppfunc.training.optim import adamw, sgd
    >>> optimizer = by_name({"*norm*|*.bias": sgd(1.0), "*": sgd(0.5)})
    >>> params = {"norm": torch.tensor(1.0), "w": torch.tensor(1.0)}
    >>> optimizer.update(params, optimizer.init(params), params)[0]
    {'norm': tensor(0.), 'w': tensor(0.5000)}
    """
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(key, str) for key in groups):
        raise TypeError(
            f'groups: got {shown(groups)}, expected optimizers by pattern, such as {{"*norm*": adamw(1e-3),'
            ' "*": adamw(1e-3, weight_decay=0.1)}'
        )
    how = "by the norm of its own gradients; expected chain(clip, by_name(...)), which clips by that of all"
    optimizers = {key: unclipped(f"groups[{key!r}]", each, how) for key, each in groups.items()}
    keys = list(groups)
    require_reachable("groups", keys)

    def group_of(name: str, parameter: ParameterKind) -> int:
        if (key := first_match(name, keys)) is None:
            raise ValueError(
                f'the parameter {name!r} matches none of {", ".join(map(repr, keys))}; add a group "*"'
            )
        return keys.index(key)

    def write() -> str:
        texts = ", ".join(f"{key!r}: {text_of(optimizer)}" for key, optimizer in groups.items())
        return f"by_name({texts})"

    made = divided(group_of, optimizers, write)

    def patterns(params: Tree) -> dict[str, bool]:
        used, (leaves, treedef) = dict[str, bool](), tree_flatten(params)
        pairs = zip(names_in(treedef), leaves, strict=True)
        names = (name for name, leaf in pairs if differentiable(leaf.dtype))
        note_patterns(used, "by_name", keys, names)
        return used | made.patterns(params)

    return made._replace(patterns=patterns)


def divided(
    group_of: Callable[[str, ParameterKind], int],
    optimizers: Mapping[str, Optimizer],
    write: Callable[[], str],
) -> Optimizer:
    """Make an optimizer of several: the n-th updates the parameters for which ``group_of`` returns n.

    Their updates take ``found_inf``.
    """
    every = list(optimizers.values())
    names = [f"group{n}" for n in range(len(every))]

    @lru_cache(maxsize=64)  # stages
    def numbers_of(treedef: PyTreeSpec, kinds: tuple[tuple[int, torch.dtype], ...]) -> list[int]:
        pairs = zip(names_in(treedef), kinds, strict=True)
        return [group_of(n, ParameterKind(*kind)) if differentiable(kind[1]) else 0 for n, kind in pairs]

    def divisions(params: Tree, *trees: Tree) -> tuple[list[list[Tree]], list[int], PyTreeSpec]:
        """Divide trees like the parameters; a division leaves out the leaves of other groups.

        Also return the group of every leaf, and the structure.
        """
        leaves, treedef = tree_flatten(params)
        numbers = numbers_of(treedef, tuple([(p.ndim, p.dtype) for p in leaves]))
        columns = [treedef.flatten_up_to(tree) for tree in (params, *trees)]
        parts = [
            [
                treedef.unflatten(x if n == number else None for x, n in zip(column, numbers, strict=True))
                for number in range(len(every))
            ]
            for column in columns
        ]
        return parts, numbers, treedef

    def init(params: Tree) -> dict[str, Tree]:
        (divided_params,), *_ = divisions(params)
        return {name: o.init(mine) for name, o, mine in zip(names, every, divided_params, strict=True)}

    def patterns(params: Tree) -> dict[str, bool]:
        (divided_params,), *_ = divisions(params)
        groups = zip(optimizers, every, divided_params, strict=True)
        return {
            f"groups[{key!r}]: {text}": takes
            for key, o, mine in groups
            for text, takes in o.patterns(mine).items()
        }

    def update(
        grads: Tree, state: dict[str, Tree], params: Tree, *, found_inf: torch.Tensor | None = None
    ) -> tuple[Tree, dict[str, Tree]]:
        if not isinstance(state, dict) or list(state) != names:
            raise ValueError(f"state: got {shown(state)}, expected the groups {', '.join(names)}")
        trees, numbers, treedef = divisions(params, grads)
        groups = zip(names, every, *trees, strict=True)
        results = [o.update(g, state[name], p, found_inf=found_inf) for name, o, p, g in groups]
        columns: list[list[Any]] = [treedef.flatten_up_to(new) for new, _ in results]
        new = treedef.unflatten(columns[number][n] for n, number in enumerate(numbers))
        return new, {name: after for name, (_, after) in zip(names, results, strict=True)}

    def rate(state: dict[str, Tree], since: torch.Tensor) -> dict[str, Any]:
        rates = zip(optimizers, names, [optimizer.rate for optimizer in every], strict=True)
        return {key: of(state[name], since) for key, name, of in rates if of is not None}

    elementwise = all(o.elementwise for o in every)
    return Optimizer(init, update, text=write, elementwise=elementwise, rate=rate, patterns=patterns)
