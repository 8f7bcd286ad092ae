"""Give groups of parameters optimizers of their own, by name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from optree import PyTreeSpec

from ppfunc._checks import shown
from ppfunc.stage.frozen import ParameterKind
from ppfunc.stage.signature import differentiable, first_match, names_in, note_patterns, require_reachable
from ppfunc.stage.tree import tree_flatten

from .protocols import Optimizer, Tree, text_of, unclipped

Choose = Callable[[str, ParameterKind], str]
"""From the name of a parameter in its stage, and an object with its ``ndim`` and ``dtype``, to a group."""

_used: ContextVar[dict[str, bool] | None] = ContextVar("used", default=None)


@contextmanager
def noting_patterns(group: str | None = None) -> Iterator[dict[str, bool]]:
    """Collect the patterns of optimizers that make a state, and whether each takes a parameter.

    Args:
        group: whose optimizer makes it; then who collects around gets them too, with the name of the group.
    """
    used, around = dict[str, bool](), _used.get()
    token = _used.set(used)
    try:
        yield used
    finally:
        _used.reset(token)
    if around is not None and group is not None:
        around |= {f"groups[{group!r}]: {text}": takes for text, takes in used.items()}


def by_name(groups: Mapping[str, Optimizer], choose: Choose | None = None) -> Optimizer:
    """Make an optimizer of several: each updates the parameters of a group.

    A parameter is named in its stage by the keys on the way to it, joined by dots: ``h.3.attn.weight``. Its
    state is a dictionary with that of each group in order, ``group0``, ``group1``, ..., whose trees have
    None in the place of parameters of other groups.

    Args:
        groups: by patterns of names, as of a shell, alternatives divided by ``|``. The first that matches
            counts.
        choose: chooses one of the keys of ``groups`` instead, which then are no patterns.

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
    if choose is not None and not callable(choose):
        raise TypeError(f"choose: got {shown(choose)}, expected a function (name, parameter) -> key")
    if choose is None:
        require_reachable("groups", keys)

    def group_of(name: str, parameter: ParameterKind) -> int:
        if choose is None:
            if (key := first_match(name, keys)) is None:
                raise ValueError(
                    f'the parameter {name!r} matches none of {", ".join(map(repr, keys))}; add a group "*"'
                )
        elif (key := choose(name, parameter)) not in groups:
            raise ValueError(
                f"choose({name!r}, ...): got {shown(key)}, expected one of {', '.join(map(repr, keys))}"
            )
        return keys.index(key)

    chosen = "" if choose is None else f" of {getattr(choose, '__qualname__', type(choose).__name__)}"

    def write() -> str:
        texts = ", ".join(f"{key!r}: {text_of(optimizer)}" for key, optimizer in groups.items())
        return f"by_name({texts}{chosen})"

    made = divided(group_of, optimizers, write)

    def init(params: Tree) -> dict[str, Tree]:
        if choose is None and (used := _used.get()) is not None:
            leaves, treedef = tree_flatten(params)
            pairs = zip(names_in(treedef), leaves, strict=True)
            note_patterns(used, "by_name", keys, (name for name, leaf in pairs if differentiable(leaf.dtype)))
        return made.init(params)

    return made._replace(init=init)


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
        """Divide trees like the parameters; also return the group of every leaf, and their structure."""
        leaves, treedef = tree_flatten(params)
        numbers = numbers_of(treedef, tuple([(p.ndim, p.dtype) for p in leaves]))
        return [_groups(tree, treedef, numbers, len(every)) for tree in (params, *trees)], numbers, treedef

    def init(params: Tree) -> dict[str, Tree]:
        (divided_params,), *_ = divisions(params)
        state = dict[str, Tree]()
        for key, name, o, mine in zip(optimizers, names, every, divided_params, strict=True):
            with noting_patterns(key):
                state[name] = o.init(mine)
        return state

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
    return Optimizer(init, update, text=write, elementwise=elementwise, rate=rate)


def _groups(tree: Tree, treedef: PyTreeSpec, numbers: Sequence[int], groups: int) -> list[Tree]:
    """Divide a tree, given the group of every leaf; None stands for the leaves of other groups."""
    leaves = treedef.flatten_up_to(tree)
    return [
        treedef.unflatten(x if n == number else None for x, n in zip(leaves, numbers, strict=True))
        for number in range(groups)
    ]
