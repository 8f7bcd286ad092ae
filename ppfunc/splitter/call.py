"""Read how a model is called: tensors in its arguments are the inputs of a step, the rest is constant."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import torch
from optree import PyTreeSpec

from ppfunc._checks import mend_for, shown
from ppfunc.stage.constants import with_constants
from ppfunc.stage.signature import Unquoted
from ppfunc.stage.tree import filled, tree_flatten, tree_map, tree_structure

Changes = tuple[tuple[int, Any], ...]
"""Numbers, texts and flags in the place of constants of the split, with the numbers of these."""


class LeafForm(NamedTuple):
    """Describe the form of one input tensor.

    Args:
        shape, dtype: of the tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


class CallForm(NamedTuple):
    """Describe the form of one call of a model.

    Args:
        treedef: structure of ``(args, kwargs)``.
        constants: its leaves; None in the places of tensors.
        places: the positions of the tensors among the leaves.
        inputs: structure of ``(args, kwargs)`` as a step gets them. Keyword arguments without tensors are
            left out; other leaves that are no tensors are None.
        kind: what a step gets: ``"one"`` positional argument itself; the tuple of ``"args"``; the
            ``"kwargs"``; ``"both"``, the positional arguments and, last, the keyword arguments, in a tuple.
    """

    treedef: PyTreeSpec
    constants: tuple[Any, ...]
    places: tuple[int, ...]
    inputs: PyTreeSpec
    kind: str

    @classmethod
    def of(cls, args: Any, kwargs: Mapping[str, Any] | None) -> tuple[Self, tuple[torch.Tensor, ...]]:
        """Read the form of a call, and its tensors.

        Args:
            args: one argument, a tuple of positional arguments, or a dictionary of keyword arguments.
            kwargs: keyword arguments beside positional ones.
        """
        if isinstance(args, dict) and kwargs is None:
            args, kwargs = (), args
        kind = "one" if not isinstance(args, tuple) else "args"
        args = args if isinstance(args, tuple) else (args,)
        if not isinstance(kwargs, Mapping | None):
            raise TypeError(
                f"kwargs: got {type(kwargs).__name__}, expected a dictionary of keyword arguments"
            )
        kwargs = dict(kwargs or {})
        if not all(isinstance(key, str) for key in kwargs):
            raise TypeError(f"kwargs: got the keys {list(kwargs)}, expected names of arguments")
        args, kwargs = with_constants((args, kwargs), "args", masks_alone=True)
        leaves, treedef = tree_flatten((args, kwargs), "args")
        places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        if not places:
            mend = "give the arguments of one call of the model, such as args=(ids,), on meta if you like"
            raise ValueError(f"args: got no tensor in {shown(args)}; {mend_for((*args, 0)[0], mend)}")
        if any(_has_tensors(value) for value in kwargs.values()):
            kind = "kwargs" if not args else "both"
        constants = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        with_tensors = {key: value for key, value in kwargs.items() if _has_tensors(value)}
        inputs = tree_map(lambda leaf: leaf if isinstance(leaf, torch.Tensor) else None, (args, with_tensors))
        form = cls(treedef, constants, places, tree_structure(inputs), kind)
        return form, tuple(leaves[i] for i in places)

    def with_changes(self, changes: Changes) -> "CallForm":
        """Return the form of a call with other constants."""
        changed = dict(changes)
        constants = tuple(changed.get(place, value) for place, value in enumerate(self.constants))
        return self._replace(constants=constants)

    def arguments(self, tensors: tuple[torch.Tensor | None, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Build the arguments of the model from tensors, with block masks in parts."""
        arguments: Any = self.treedef.unflatten(filled(self.constants, self.places, tensors))
        return arguments

    def read(self, x: Any) -> tuple[tuple[torch.Tensor, ...], Changes]:
        """Take the tensors out of an input of the first stage, and the constants that differ.

        Raises:
            ValueError: it has another structure than the call at the split.
        """
        x = with_constants(x, "inputs", masks_alone=True)
        arguments: tuple[Any, Any]
        match self.kind:
            case "one" | "args":
                args = (
                    x if isinstance(x, tuple) and (self.kind == "args" or self._ends_in_kwargs(x)) else (x,)
                )
                arguments = (args[:-1], args[-1]) if self._ends_in_kwargs(args) else (args, {})
            case "kwargs":
                arguments = (), x
            case _:
                arguments = (x[:-1], x[-1]) if isinstance(x, tuple) and x else ((x,), {})
        leaves, treedef = tree_flatten(arguments, "inputs")
        if treedef == self.inputs and all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return tuple(leaves), ()
        args, named = self.arguments((None,) * len(self.places))
        filled = tuple(a if b is None else b for a, b in zip(args, arguments[0], strict=False))
        leaves, treedef = tree_flatten((filled, _updated(named, arguments[1])))
        places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        if treedef != self.treedef or places != self.places or len(args) != len(arguments[0]):
            got = tree_map(lambda leaf: _TENSOR if isinstance(leaf, torch.Tensor) else leaf, x)
            raise ValueError(
                f"inputs: got {got}, expected {self.expected}, as the arguments at the split; or"
                " split again with arguments of this form"
            )
        changes = enumerate(zip(self.constants, leaves, strict=True))
        return tuple(leaves[i] for i in places), tuple(
            (i, now) for i, (then, now) in changes if i not in places and repr(then) != repr(now)
        )

    def _ends_in_kwargs(self, args: Any) -> bool:
        """Tell whether keyword arguments without tensors follow the positional ones."""
        if not (isinstance(args, tuple) and args and isinstance(args[-1], dict)):
            return False
        _, named = self.arguments((None,) * len(self.places))
        return bool(named) and named.keys() >= args[-1].keys() and not _has_tensors(args[-1])

    @property
    def expected(self) -> str:
        """Describe the structure of the inputs of a step."""
        args, kwargs = self.inputs.unflatten([_TENSOR] * self.inputs.num_leaves)
        return str(
            {"one": args[0] if args else None, "args": args, "kwargs": kwargs, "both": (*args, kwargs)}[
                self.kind
            ]
        )


_TENSOR = Unquoted("tensor")


def _updated(named: dict[str, Any], changes: Any) -> Any:
    """Replace keyword arguments, in the order of the split; return anything else as it is."""
    if not isinstance(changes, dict) or not changes.keys() <= named.keys():
        return changes
    return {key: changes.get(key, value) for key, value in named.items()}


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_flatten(value)[0])
