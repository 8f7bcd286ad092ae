"""Read the tensors of a model, and how it is called: tensors in its arguments are the inputs of a step, the
rest is constant.
"""

import reprlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple, Self

import torch
from optree import PyTreeSpec, treespec_paths

from ppfunc._checks import require_type, shown
from ppfunc.stage.constants import by_value, is_known, leaves_and_known, with_constants
from ppfunc.stage.modules import further_places, is_subclass
from ppfunc.stage.signature import Unquoted
from ppfunc.stage.tree import filled, tree_flatten, tree_map

MODEL = "the model"
"""Names the model in errors."""


class Tensors(NamedTuple):
    """Hold the tensors of a model, each once.

    Args:
        params: the parameters, by the first name of each.
        buffers: the buffers likewise.
        places: further names, of tied tensors, each with the first one.
    """

    params: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    places: Mapping[str, str]

    @classmethod
    def of(cls, model: torch.nn.Module) -> Self:
        """Collect the tensors of the model as they are now."""
        params = {name: p for name, p in model.named_parameters() if not is_subclass(p)}
        known = set(map(id, params.values()))
        buffers = {name: b for name, b in model.named_buffers() if id(b) not in known}
        return cls(params, buffers, further_places(model, {*params, *buffers}))


class LeafForm(NamedTuple):
    """Describe the form of one input tensor.

    Args:
        shape: the sizes of the tensor, ints.
        dtype: the dtype of its elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{','.join(map(str, self.shape))}]"


class CallForm(NamedTuple):
    """Describe the form of one call of a model.

    Args:
        treedef: structure of ``(args, kwargs)``.
        constants: the leaves of the call; None in the places of tensors.
        places: the positions of the tensors among the leaves.
    """

    treedef: PyTreeSpec
    constants: tuple[Any, ...]
    places: tuple[int, ...]

    @classmethod
    def of(cls, args: Any, kwargs: Any, name: str = "args") -> tuple[Self, tuple[torch.Tensor, ...]]:
        """Read the form of a call, and its tensors.

        Args:
            args: the argument, a tuple of positional arguments, or a dictionary of keyword arguments.
            kwargs: the keyword arguments beside positional arguments.
            name: the argument in which users give the call, for errors.

        Raises:
            TypeError: the keyword arguments are no dictionary, or their keys no texts.
            ValueError: the call has no tensor.
        """
        if isinstance(args, dict) and kwargs is None:
            args, kwargs = (), args
        args = args if isinstance(args, tuple) else (args,)
        if not isinstance(kwargs, Mapping | None):
            raise TypeError(
                f"kwargs: got {shown(kwargs)}, expected a dictionary of keyword arguments; where to cut is"
                f" given by name, at={reprlib.repr(kwargs)}"
            )
        kwargs = dict(kwargs or {})
        if not all(isinstance(key, str) for key in kwargs):
            raise TypeError(f"kwargs: got the keys {list(kwargs)}, expected names of arguments")
        args, kwargs = with_constants((args, kwargs), name, masks_alone=True)
        leaves, treedef = tree_flatten((args, kwargs), name)
        places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        if not places:
            raise ValueError(
                f"{name}: got no tensor in {shown(args or kwargs)}; give the arguments of one call of the"
                " model, such as (ids,) or {'input_ids': ids}, at the split on meta if you like"
            )
        constants = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return cls(treedef, constants, places), tuple(leaves[i] for i in places)

    @property
    def key(self) -> Hashable:
        """Return a key that is equal for calls with the same structure and constants."""
        return self.treedef, repr(self.constants)

    def arguments(self, tensors: Sequence[Any] = ()) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Build the arguments of the model from tensors, with block masks in parts.

        Without tensors, a text stands for each.
        """
        given = tensors or [_TENSOR] * len(self.places)
        arguments: Any = self.treedef.unflatten(filled(self.constants, self.places, given))
        return arguments

    def names(self, model: torch.nn.Module) -> list[str]:
        """Name the argument that each tensor is in."""
        positional, paths = [*signature(model.forward).parameters], treespec_paths(self.treedef)
        keys = [paths[place][:2] for place in self.places]
        return [
            positional[key] if not of_kwargs and key < len(positional) else str(key)
            for of_kwargs, key in keys
        ]

    @property
    def positional(self) -> int:
        """Count the positional arguments."""
        return len(self.arguments()[0])

    @property
    def fixed(self) -> dict[int | str, Any]:
        """Return the arguments without tensors, by position or name."""
        args, kwargs = self.arguments()
        each: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        return {
            at: value
            for at, value in each
            if not any(isinstance(leaf, Unquoted) or is_known(leaf) for leaf in leaves_and_known(value))
        }

    def described(self, tensors: Sequence[LeafForm] = ()) -> str:
        """Describe the inputs of a step, with the forms of the tensors if they are given."""
        (args, kwargs), fixed = self.arguments(tensors), self.fixed
        args = tuple(None if n in fixed else value for n, value in enumerate(args))
        kwargs = {key: value for key, value in kwargs.items() if key not in fixed}
        return str((*args, kwargs) if args and kwargs else kwargs or (args[0] if len(args) == 1 else args))


_TENSOR = Unquoted("tensor")


class Constants(NamedTuple):
    """Name the arguments of a model whose values belong to the split.

    Args:
        names: the names of the arguments.
        numbers: the positions of the arguments in a call by position.
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
        forms: the forms of the calls at the split, all with as many positional arguments.
        x: the input.

    Raises:
        ValueError: the input has another number of positional arguments, or no tensor.
    """
    first = forms[0]
    args, kwargs = (x if isinstance(x, tuple) else (x,)), {}
    if len(args) == first.positional + 1 and isinstance(args[-1], dict):
        args, kwargs = args[:-1], args[-1]
    if len(args) != first.positional:
        got = tree_map(lambda leaf: _TENSOR if isinstance(leaf, torch.Tensor) else leaf, x)
        raise ValueError(
            f"inputs: got {reprlib.repr(got)}, expected {first.described()}, as the arguments at the split,"
            " with None or no keyword argument for what a microbatch has not; or split again with arguments"
            " of this form; targets are given as the argument after inputs"
        )
    others = [form.fixed for form in forms[1:]]
    fixed = {
        at: value
        for at, value in first.fixed.items()
        if all(at in other and repr(other[at]) == repr(value) for other in others)
    }
    args = tuple(fixed.get(n) if value is None else value for n, value in enumerate(args))
    named = {key: value for key, value in fixed.items() if isinstance(key, str)} | kwargs
    order = (*first.arguments()[1], *named)  # as at the split, whose trace then serves
    return CallForm.of(args, {key: named[key] for key in order if key in named}, "inputs")
