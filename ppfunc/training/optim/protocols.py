"""Define optimizers and transforms of gradients: pairs of pure functions."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from ppfunc._checks import naming_arguments, shown
from ppfunc.stage._torch import versions
from ppfunc.stage.tree import tree_leaves, tree_map, tree_structure

from .norms import Clip

Tree = Any


Update = Callable[..., tuple[Tree, Tree]]

Leaves = Sequence[torch.Tensor]

UpdateLeaves = Callable[
    [Leaves, Leaves, Leaves, torch.Tensor | None, list[torch.Tensor]], tuple[Leaves, Leaves]
]
"""``update(grads, state, params, found_inf, written) -> (params, state)``, of leaves of trees that are known.

Each call goes on from the last. ``written`` gets the arguments that it writes into, before it does.
"""


@naming_arguments
class Optimizer(NamedTuple):
    """Pair the functions of an optimizer; any such pair serves as one.

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
        text: its name and numbers, which ranks that train together compare in every step, or a function that
            writes them; by default the name of ``update``.
        elementwise: an update is known to work element by element, whole matrices of :func:`muon` aside. Of
            others, a trainer that cuts parameters over ranks tries it out.
        rate: ``rate(state, since) -> lr``, for the metrics of a trainer: the learning rate of the update that
            is made ``since`` updates, int64[], after this state; of several groups a dictionary.
        on_leaves: the ``update`` that this replaces, and ``prepare(state, params)``, which checks trees once
            and makes the function that updates their leaves in the steps of a trainer. Beside another
            ``update`` it is not used.

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

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            f"optimizer.{name} = {shown(value)}: an optimizer is a value; make another one, such as"
            " ppfunc.optim.adamw(1e-4), or give a rate that is a function of the number of updates, such as"
            " ppfunc.optim.linear(1e-3, 0.0, steps=1000)"
        )


def prepared(optimizer: Optimizer, state: Tree, params: Tree) -> UpdateLeaves | None:
    """Make the update of trees of this form from the leaves of one to those of the next; None without one."""
    if optimizer.on_leaves is None or optimizer.on_leaves[0] is not optimizer.update:
        return None
    return optimizer.on_leaves[1](state, params)


def require_pair(name: str, pair: Any) -> None:
    """Raise TypeError for an object without the functions ``init`` and ``update``."""
    if not callable(getattr(pair, "init", None)) or not callable(getattr(pair, "update", None)):
        raise TypeError(
            f"{name}: got {shown(pair)}, expected init and update; make an optimizer, such as"
            " ppfunc.optim.adamw(1e-3)"
        )


def unclipped(name: str, optimizer: Any, how: str) -> Optimizer:
    """Return an optimizer whose update takes ``found_inf``; raise ValueError for one that clips."""
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
    """Make an optimizer whose update takes ``found_inf`` from one whose update may not.

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
