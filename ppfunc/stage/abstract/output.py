"""Carry losses, metrics, state and skip connections beside the activation of a stage."""

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from ..constants import with_constants, without_constants
from ..errors import StageError, line_of, raised
from ..layout import whole
from ..program import TARGETED, Carried, Output, Received
from ..signature import Signature, flatten
from ..tree import tree_flatten, tree_leaves, tree_map, tree_structure
from .evaluation import DATA_DEPENDENT, NoValuesError
from .purity import IN_PARAMS


@dataclass(frozen=True, slots=True)
class StageFunction:
    """A stage at its place in a flow, with its loss, in the form that the runtime differentiates.

    Equivalent to::

        def call(params, x, *extras):           # the target of a loss, then extras, then the state
            out = fn(params, x, *extras)        # without the target of a loss; the ``frozen`` leaves detached
            loss, aux = loss_fn(out.y, target)
            return (out.y, out.skips, loss + out.loss), (outputs, out.metrics, aux, out.state)

    With a carry, ``x`` is :class:`Carried`, ``fn`` gets ``(params, x, carry, *extras)``, and ``out.carry`` is
    the last of the skips.

    A loss function that returns the loss alone has None for ``aux``.

    Args:
        fn: the user's function.
        loss_fn: the user's loss function, for a last stage.
        last: whether it ends its flow.
        receivers: number of stages that take its output as their input; a last stage has none.
        returns_outputs: whether its output is returned to the caller.
        skips: the stages of the model that it sends skip connections to.
        frozen: numbers of the parameters that get no gradient.
        carries: whether it hands a carry to itself.
        ends: whether the slice is the last of its sequence, whose carry nothing differentiates.
        weightless: whether its losses have no weight, while its carry and its output may have gradients.
    """

    fn: Callable[..., Any]
    loss_fn: Callable[[Any, Any], Any] | None = None
    last: bool = False
    receivers: int = 0
    returns_outputs: bool = False
    skips: tuple[int, ...] = ()
    frozen: frozenset[int] = frozenset()
    carries: bool = False
    ends: bool = False
    weightless: bool = False

    @property
    def targeted(self) -> bool:
        """Tell whether its third argument is the target, of its own or of the loss function."""
        return self.loss_fn is not None or self.takes_target

    @property
    def takes_target(self) -> bool:
        """Tell whether the user's function takes the target."""
        return getattr(self.fn, TARGETED, False)

    def __call__(self, params: Any, x: Any, *extras: Any) -> tuple[Any, Any]:
        """Call the stage.

        Raises:
            ValueError: it returns skip connections to other stages than ``skips``, those of the schedule; no
                carry to the next slice, or a carry without slices.
        """
        x, extras = without_constants(x), tuple(map(without_constants, extras))
        target, rest = (extras[0], extras[1:]) if self.targeted else (None, extras)
        if self.frozen:
            leaves, treedef = tree_flatten(params)
            params = treedef.unflatten(
                leaf.detach() if n in self.frozen else leaf for n, leaf in enumerate(leaves)
            )
        given = (target, *rest) if self.takes_target else rest
        out = self.fn(params, *(x if self.carries else (x,)), *given)
        if out is None:
            raise TypeError(
                "it returned None, expected its activation: end it with `return y`, or with `return ()` if it"
                " has none"
            )
        if not isinstance(out, Output):
            out = Output(out)
        y = with_constants(out.y, "returned y")  # the loss gets numbers, texts and flags as they are
        # Other leaves than tensors are refused by the place where they were returned.
        for name, tree in out._replace(y=y)._asdict().items():
            flatten(tree, f"returned {name}")
        skips = out.skips or {}
        if set(skips) != set(self.skips):
            lacks = sorted({*self.skips}.difference(skips))
            raise ValueError(
                f"it returns skip connections to the stages {sorted(skips)}, the schedule has them to"
                f" {sorted(self.skips)}; "
                + (
                    f"return Output(y, skips={{{', '.join(f'{s}: tree' for s in lacks)}}})"
                    if lacks
                    else "declare them by ppfunc.with_skips(schedule, [(source, destination), ...])"
                )
            )
        if (out.carry is None) is self.carries:
            raise ValueError(
                "it returns no carry, but the schedule has slices: return Output(y, carry=tree), or carry=()"
                " if the next slice needs none, or, of a module, stage_from_module(module, carry=name)"
                if out.carry is None
                else "it returns a carry, but the schedule has no slices: take one of slices, such as seq1f1b"
            )
        loss, aux = None if out.loss is None else whole(out.loss), None
        if self.loss_fn is not None:
            main, aux = _of_loss_function(self.loss_fn, out.y, target)
            loss = whole(main) if loss is None else whole(main) + loss
        found = "an output that nobody takes" if tree_leaves(y) else "nothing"
        nothing = all(tree is None for tree in out[1:])
        if not (self.last or self.receivers) and (nothing or tree_leaves(y)):
            raise ValueError(
                f"no edge of the schedule leads on from it, and it returns {found}; return Output((),"
                " loss=...), or Output((), skips={destination: tree})"
            )
        activation = (y,) * self.receivers if self.receivers > 1 else y if self.receivers else None
        outputs = y if self.returns_outputs else None
        state = _in_order_of(rest[-1], out.state) if rest else out.state
        if self.weightless and loss is not None:
            loss = loss.detach()  # 0 times a gradient that is not finite would be NaN
        carry = tree_map(torch.Tensor.detach, out.carry) if self.ends else out.carry
        sent = tuple(skips[s] for s in self.skips) + ((carry,) if self.carries else ())
        return (activation, sent, loss), (outputs, out.metrics, aux, state)


def _of_loss_function(loss_fn: Callable[[Any, Any], Any], y: Any, target: Any) -> tuple[Any, Any]:
    """Compute the loss and its ``aux``; name the loss function, not the stage, in its errors."""
    try:
        loss = loss_fn(y, target)
        loss, aux = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, None)
        flatten(aux, "aux")  # refuses other leaves than tensors
    except StageError as error:
        if error.instead != IN_PARAMS:
            raise
        mend = "compute that in a stage, which returns it as Output(y, loss=...) or a part of y; or detach it"
        raise StageError("the loss", error.reason, mend) from None
    except (NoValuesError, *DATA_DEPENDENT):
        raise
    except Exception as error:
        raise StageError(
            "the loss",
            f"{raised(error)}; it is called as loss(y, target), and the last stage returned y ="
            f" {Signature.of(with_constants(y))}{', targets are None' if target is None else ''}",
            "take both; where the model returns its loss, give lambda y, _: y.loss"
            if "positional argument" in str(error) and not line_of(error)  # of the function itself
            else "pass targets=, in a step as the argument after inputs"
            if target is None
            else "",
        ) from error
    if not isinstance(loss, torch.Tensor):
        mend = "return a scalar tensor, without .item() or float()"
        if loss is None:
            mend = "return a scalar tensor; a model returns a loss of its own if labels are among its inputs"
        if isinstance(loss, tuple | list | dict):
            mend = "return (loss, aux), and pass has_aux=True: aux is a tree of tensors that you want to see"
        raise StageError(
            "the loss",
            f"it returned {reprlib.repr(loss)} of type {type(loss).__name__}, expected a tensor",
            mend,
        )
    return loss, aux


def _in_order_of(before: Any, state: Any) -> Any:
    """Reorder the keys of a new state as in the one before; another structure is refused in lowering."""
    treedef = tree_structure(before)
    try:
        return treedef.unflatten(treedef.flatten_up_to(state))
    except (ValueError, TypeError):
        return state


def received_signature(
    sources: Sequence[int], parts: Sequence[Signature], along: int, carries: bool
) -> Signature:
    """Return the signature of a stage's input from ``sources``: the batch, or stages before, first.

    Args:
        along: number of the parts that are its input proper: a tuple, where there are several.
        carries: whether the last part is the carry of the stage.
    """
    trees = [part.unflatten(part.leaves) for part in parts]
    x, skips = trees[0] if along == 1 else tuple(trees[:along]), trees[along : len(trees) - carries]
    given = Received(x, dict(zip(sources[along:], skips, strict=False))) if skips else x
    leaves, treedef = tree_flatten(Carried(given, trees[-1]) if carries else given)
    return Signature(treedef, tuple(leaves))


def children(signature: Signature) -> tuple[Signature, ...]:
    """Return the signatures of the children of a tree's root."""
    rest = iter(signature.leaves)
    return tuple(
        Signature(child, tuple(islice(rest, child.num_leaves))) for child in signature.treedef.children()
    )
