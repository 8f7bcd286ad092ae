"""Read how a model is called: tensors in its arguments are the inputs of a step, the rest is constant."""

import reprlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple, Self

import torch
from optree import PyTreeSpec, treespec_paths

from ppfunc._checks import require_type, shown
from ppfunc.stage.constants import by_value, is_known, leaves_and_known, with_constants
from ppfunc.stage.signature import Unquoted
from ppfunc.stage.tree import filled, tree_flatten, tree_map, tree_structure


class LeafForm(NamedTuple):
    """Describe the form of one input tensor.

    Args:
        shape, dtype: of the tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{','.join(map(str, self.shape))}]"


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
                f"kwargs: got {shown(kwargs)}, expected a dictionary of keyword arguments; where to cut is"
                f" given by name, at={reprlib.repr(kwargs)}"
            )
        kwargs = dict(kwargs or {})
        if not all(isinstance(key, str) for key in kwargs):
            raise TypeError(f"kwargs: got the keys {list(kwargs)}, expected names of arguments")
        args, kwargs = with_constants((args, kwargs), "args", masks_alone=True)
        leaves, treedef = tree_flatten((args, kwargs), "args")
        places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        if not places:
            raise ValueError(
                f"args: got no tensor in {shown(args)}; give the arguments of one call of the model, such as"
                " args=(ids,) or args={'input_ids': ids}, on meta if you like"
            )
        if any(_has_tensors(value) for value in kwargs.values()):
            kind = "kwargs" if not args else "both"
        constants = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        with_tensors = {key: value for key, value in kwargs.items() if _has_tensors(value)}
        inputs = tree_map(lambda leaf: leaf if isinstance(leaf, torch.Tensor) else None, (args, with_tensors))
        form = cls(treedef, constants, places, tree_structure(inputs), kind)
        return form, tuple(leaves[i] for i in places)

    @property
    def key(self) -> Hashable:
        """Return a key that is equal for calls with the same structure and constants."""
        return self.treedef, repr(self.constants)

    def arguments(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Build the arguments of the model from tensors, with block masks in parts."""
        arguments: Any = self.treedef.unflatten(filled(self.constants, self.places, tensors))
        return arguments

    def names(self, model: torch.nn.Module) -> list[str]:
        """Name the argument that each tensor is in."""
        positional, paths = [*signature(model.forward).parameters], treespec_paths(self.treedef)
        keys = [paths[place][:2] for place in self.places]
        return [
            positional[key] if not of_kwargs and key < len(positional) else str(key)
            for of_kwargs, key in keys
        ]

    def taken_apart(self, x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Take positional and keyword arguments out of an input of the first stage.

        Raises:
            ValueError: the input has another kind than the call, or another number of positional arguments.
        """
        args, kwargs = (x if isinstance(x, tuple) else (x,)), {}
        if self.kind == "kwargs":
            args, kwargs = (), x
        elif self.kind == "one" and not self._ends_in_kwargs(args):
            args = (x,)
        elif args and (self.kind == "both" or self._ends_in_kwargs(args)):
            args, kwargs = args[:-1], args[-1]
        wanted, _ = self.arguments((None,) * len(self.places))
        if len(args) != len(wanted) or not isinstance(kwargs, dict):
            got = tree_map(lambda leaf: _TENSOR if isinstance(leaf, torch.Tensor) else leaf, x)
            raise ValueError(
                f"inputs: got {reprlib.repr(got)}, expected {self.described()}, as the arguments at the"
                " split, with None or no keyword argument for what a microbatch has not; or split again with"
                " arguments of this form;"
                " targets are given as the argument after inputs"
            )
        return args, kwargs

    def _ends_in_kwargs(self, args: tuple[Any, ...]) -> bool:
        """Tell whether keyword arguments without tensors follow the positional ones."""
        if not (args and isinstance(args[-1], dict)):
            return False
        _, named = self.arguments((None,) * len(self.places))
        return bool(named) and named.keys() >= args[-1].keys() and not _has_tensors(args[-1])

    @property
    def fixed(self) -> dict[int | str, Any]:
        """Return the arguments without tensors, by position or name."""
        args, kwargs = self.arguments([_TENSOR] * len(self.places))
        each: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        return {at: value for at, value in each if not _has_tensors(value)}

    def described(self, tensors: Sequence[LeafForm] = ()) -> str:
        """Describe the structure of the inputs of a step, and the forms of all leaves if known."""
        count = self.inputs.num_leaves
        args, kwargs = self.inputs.unflatten(tensors if len(tensors) == count else [_TENSOR] * count)
        return str(
            {"one": args[0] if args else None, "args": args, "kwargs": kwargs, "both": (*args, kwargs)}[
                self.kind
            ]
        )


_TENSOR = Unquoted("tensor")


class Constants(NamedTuple):
    """Name the arguments of a model whose values belong to the split.

    Args:
        names: of the arguments.
        numbers: the positions of these in a call by position.
    """

    names: frozenset[str]
    numbers: frozenset[int]

    @classmethod
    def of(cls, names: Sequence[str], model: torch.nn.Module) -> Self:
        """Find the positions of arguments."""
        require_type("constants", names, list | tuple, "a list of names of arguments")
        parameters = signature(model.forward).parameters
        further = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        if unknown := [name for name in names if name not in parameters and not further]:
            raise ValueError(
                f"constants: got {unknown[0]!r}, expected names of arguments of the model, which are"
                f" {', '.join(parameters)}"
            )
        return cls(frozenset(names), frozenset(n for n, name in enumerate(parameters) if name in names))

    def read(self, x: Any, read: Callable[[Any], Any] = by_value) -> Any:
        """Apply a function, which reads values, to the named arguments in an input of the first stage."""
        match x:
            case dict():
                return {key: read(value) if key in self.names else value for key, value in x.items()}
            case tuple():
                return tuple(
                    read(value)
                    if n in self.numbers
                    else self.read(value, read)
                    if type(value) is dict
                    else value
                    for n, value in enumerate(x)
                )
        return read(x) if 0 in self.numbers else x


def read_call(forms: Sequence[CallForm], x: Any) -> tuple[CallForm, tuple[torch.Tensor, ...]]:
    """Read how the model is called for an input of the first stage, and the tensors of the call.

    An argument without tensors that the input leaves out has its value of the split, if all calls there have
    the same.

    Args:
        forms: of the calls at the split, all of one kind.
        x: the input.

    Raises:
        ValueError: it is not of this kind, or has no tensor.
    """
    first, x = forms[0], with_constants(x, "inputs", masks_alone=True)
    given = first.taken_apart(x)
    leaves, structure = tree_flatten(given, "inputs")
    places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    if not places:
        raise ValueError(f"inputs: got no tensor in {shown(x)}, expected {first.described()}")
    if len(forms) == 1 and structure == first.inputs and len(places) == len(leaves):
        return first, tuple(leaves)
    fixed = {
        at: value
        for at, value in first.fixed.items()
        if all(repr(form.fixed.get(at, form)) == repr(value) for form in forms)
    }
    positional = tuple(fixed.get(n) if value is None else value for n, value in enumerate(given[0]))
    _, ordered = first.arguments((None,) * len(first.places))
    keywords = {key: given[1].get(key, fixed.get(key)) for key in ordered if key in given[1] or key in fixed}
    leaves, treedef = tree_flatten((positional, keywords | given[1]), "inputs")
    places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    constants = tuple(None if i in places else leaf for i, leaf in enumerate(leaves))
    return CallForm(treedef, constants, places, structure, first.kind), tuple(leaves[i] for i in places)


def _has_tensors(value: Any) -> bool:
    """Tell whether a value holds tensors, known ones too, or stand-ins of tensors."""
    return any(
        isinstance(leaf, torch.Tensor | Unquoted) or is_known(leaf) for leaf in leaves_and_known(value)
    )
