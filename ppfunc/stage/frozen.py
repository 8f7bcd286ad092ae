"""Say once which parameters of a step are frozen: when a step function or a trainer is made."""

import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import compress
from typing import Any

import optree
import torch

from ppfunc._checks import limited, shown

from .errors import raised, warn
from .process import process_lock
from .signature import Signature, leaf_names
from .tree import NAMESPACE, tree_flatten

Mask = Callable[[Any], Any]
"""From the parameters of a stage to a tree of booleans, or one whose leaves stand for whole branches."""

Trainable = Mapping[int, Any] | Mask | None
"""Mask of every stage: ``{stage: tree of booleans, or function}``, or one function for all stages."""

_undeclared: ContextVar[list[str] | None] = ContextVar("undeclared", default=None)

_PARAMETERS = "ppfunc_parameters"  # an attribute of the function of a stage, which functools.wraps copies


class ParameterKind:
    """Stands for a parameter in a call of a mask: a rank may hold a shard of it.

    Args:
        ndim: the number of dimensions of the parameter.
        dtype: the dtype of the parameter.
    """

    def __init__(self, ndim: int, dtype: torch.dtype) -> None:
        self.ndim, self.dtype = ndim, dtype

    def dim(self) -> int:
        return self.ndim

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"got {name!r} of a parameter, expected ndim or dtype; a rank may hold a shard of it, of another"
            " size"
        )


def masked_leaves(mask: Any, params: Signature, name: str = "mask") -> list[bool]:
    """Evaluate a mask for every leaf of the parameters of one stage.

    Where the tree has None, as for a frozen parameter, the mask sees a ParameterKind too; its answer is
    ignored.

    Args:
        mask: a function of the parameters, or the tree that it would return.
        name: the name of the mask in errors.

    Raises:
        TypeError, ValueError: the mask gave something other than booleans in the structure of the parameters.
    """
    example = f"such as {limited(str(params), 200)}"
    kinds = params.treedef.unflatten(ParameterKind(len(leaf.shape), leaf.dtype) for leaf in params.leaves)
    places, treedef = optree.tree_flatten(kinds, none_is_leaf=True, namespace=NAMESPACE)
    known = [place is not None for place in places]
    tree = treedef.unflatten(place or ParameterKind(0, torch.float32) for place in places)
    if callable(mask):
        try:
            mask = mask(tree)
        except Exception as error:
            raise ValueError(
                f"{name}: {raised(error)}; it is called with the parameters of one stage, {example}"
            ) from error
    try:
        mask = optree.tree_broadcast_prefix(mask, tree, none_is_leaf=True, namespace=NAMESPACE)
        leaves: list[Any] = list(compress(treedef.flatten_up_to(mask), known))
        if None in leaves:
            raise ValueError("got None")
    except ValueError as error:
        raise ValueError(
            f"{name}: got {reprlib.repr(mask)}, expected booleans in the structure of the parameters of one"
            f" stage, {example}"
        ) from error
    if not all(isinstance(leaf, bool) for leaf in leaves):
        raise TypeError(
            f"{name}: got {reprlib.repr(mask)}, expected a boolean for every parameter, or for a branch of"
            " them"
        )
    return leaves


def note_parameters(fn: Callable[..., Any], module: torch.nn.Module, names: Iterable[str]) -> None:
    """Note the parameters of these names with the function of a stage; which are frozen is read later."""
    places = []  # the dictionaries in which modules keep parameters, which may be replaced there
    for name in names:
        path, _, key = name.rpartition(".")
        places.append((name, module.get_submodule(path)._parameters, key))
    vars(fn)[_PARAMETERS] = lambda: {
        name: p for name, parameters, key in places if (p := parameters.get(key)) is not None
    }


def note_parts(fn: Callable[..., Any], leaves: Collection[str], parts: int) -> None:
    """Note that the function of a stage takes these parameters in parts, a tuple in the place of each."""
    if noted := vars(fn).get(_PARAMETERS):
        vars(fn)[_PARAMETERS] = lambda: {
            f"{name}{part}": p
            for name, p in noted().items()
            for part in ([f".{n}" for n in range(parts)] if name in leaves else [""])
        }


class FrozenLeaves:
    """Knows which parameters are frozen, from the time when a step function was made.

    A leaf is frozen where the module of its stage requires no gradient of it, or the mask of the stage is
    False. A module that changes its mind later is refused.

    Args:
        stages: the functions of the stages, None for those of other processes.
        trainable: the masks.

    Attributes:
        watched: the parameters that :meth:`require_unchanged` looks at.
    """

    def __init__(self, stages: Sequence[Callable[..., Any] | None], trainable: Trainable) -> None:
        if trainable is not None and not callable(trainable) and not isinstance(trainable, Mapping):
            raise TypeError(
                f"trainable: got {shown(trainable)}, expected {{stage: mask}}, or one function"
                " mask(params of a stage) -> tree of booleans"
            )
        if isinstance(trainable, Mapping) and not set(trainable) <= set(range(len(stages))):
            raise ValueError(
                f"trainable: got masks of the stages {list(trainable)}, expected some of 0 to"
                f" {len(stages) - 1}"
            )
        self._trainable = trainable
        self._numbers: dict[tuple[int, optree.PyTreeSpec], frozenset[int]] = {}
        self.watched: dict[int, tuple[str, torch.nn.Parameter, bool]] = {}
        with process_lock:  # a call of a module replaces its parameters
            self._of_modules: list[dict[str, torch.nn.Parameter]] = [
                getattr(fn, _PARAMETERS, dict)() for fn in stages
            ]
        for stage, parameters in enumerate(self._of_modules):
            for name, p in parameters.items():
                self._watch(f"stages[{stage}]: {name}", p)

    def numbers(self, stage: int, params: Signature) -> frozenset[int]:
        """Return the numbers of the frozen leaves of a stage of the model.

        Raises:
            TypeError, ValueError: a mask that does not fit the parameters; or no mask, and a module that has
                frozen some of its parameters in a stage that takes others.
        """
        key = stage, params.treedef
        if key not in self._numbers:
            mask = self._trainable.get(stage) if isinstance(self._trainable, Mapping) else self._trainable
            flags = [True] * len(params.leaves)
            if mask is not None:
                flags = masked_leaves(mask, params, f"trainable[{stage}]")
            names = leaf_names(params)
            # As they were when this was made, not as they are.
            frozen = {name: not self.watched[id(p)][2] for name, p in self._of_modules[stage].items()}
            if frozen.keys() != set(names):
                if mask is None and any(frozen.values()):
                    raise ValueError(
                        f"stages[{stage}]: it is made with functools.wraps of the function of a module that"
                        f" has frozen {', '.join(n for n in frozen if frozen[n])}; got the parameters"
                        f" {', '.join(names)}, expected those of the module, {', '.join(frozen)}; say which"
                        f" are trained, trainable={{{stage}: mask}}"
                    )
                frozen = {}
            leaves = enumerate(zip(names, flags, strict=True))
            self._numbers[key] = frozenset(
                n for n, (name, trained) in leaves if frozen.get(name) or not trained
            )
        return self._numbers[key]

    def trained(self, stage: int, params: Any) -> Any:
        """Return the parameters of a stage of the model, without the leaves that are frozen."""
        leaves, treedef = tree_flatten(params)
        fixed = self.numbers(stage, Signature.of(params))
        return treedef.unflatten(None if n in fixed else leaf for n, leaf in enumerate(leaves))

    def names(self, stage: int, params: Signature) -> list[str]:
        """Name the frozen leaves of a stage of the model."""
        names = leaf_names(params)
        return [names[n] for n in sorted(self.numbers(stage, params))]

    def warn_of_all(self, params: Mapping[int, Signature]) -> None:
        """Warn where no parameter trains, of these stages and, as far as is known, of other processes."""
        trained = (
            leaf.grad and n not in self.numbers(stage, signature)
            for stage, signature in params.items()
            for n, leaf in enumerate(signature.leaves)
        )
        elsewhere = all(
            self._trainable is None
            and bool(own := self._of_modules[stage])
            and not any(self.watched[id(p)][2] for p in own.values())
            for stage in set(range(len(self._of_modules))) - params.keys()
        )
        if elsewhere and any(signature.leaves for signature in params.values()) and not any(trained):
            warn(
                "params: all parameters are frozen, or of integers, so that none trains; set requires_grad of"
                " some, give trainable=, or convert them, as tensor.float() does"
            )

    def watch(self, stage: int, modules: Sequence[torch.nn.Module]) -> None:
        """Watch the parameters of modules that run in a stage: its function may call those of others."""
        with process_lock:
            for module in modules:
                for name, p in module.named_parameters(recurse=False):
                    self._watch(f"stages[{stage}]: {name} of its {type(module).__name__}", p)

    def require_unchanged(self) -> None:
        """Raise ValueError where a module has frozen a parameter since, set one free, or got a hook on it."""
        for name, p, trained in self.watched.values():
            _require_no_hook(name, p)
            if p.requires_grad is not trained:
                then, now = ("trained", "frozen") if trained else ("frozen", "trained")
                raise ValueError(
                    f"{name} was {then} when this step function was made, and is {now} by its module's"
                    " requires_grad; set it back, or make another step function or trainer, on every rank"
                )

    def _watch(self, name: str, p: torch.nn.Parameter) -> None:
        self.watched.setdefault(id(p), (name, p, p.requires_grad))
        _require_no_hook(name, p)


def _require_no_hook(name: str, p: torch.nn.Parameter) -> None:
    """Raise ValueError for a parameter whose gradient a hook would change or see."""
    if p._backward_hooks or p._post_accumulate_grad_hooks:
        raise ValueError(
            f"{name} has a hook on its gradient, which no step calls; remove it, and work on the gradients"
            " that the step returns"
        )


def detached(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Detach a parameter that its module has frozen; note it where a step asks for its gradient."""
    undeclared = _undeclared.get()
    if undeclared is not None and parameter.requires_grad:
        undeclared.append(name)
    return parameter.detach()


@contextmanager
def noting_undeclared() -> Iterator[list[str]]:
    """Collect the frozen parameters of which a step asks the gradient, by name; ``detached`` notes them."""
    names: list[str] = []
    token = _undeclared.set(names)
    try:
        yield names
    finally:
        _undeclared.reset(token)
