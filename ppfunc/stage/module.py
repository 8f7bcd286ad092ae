"""Stages out of ``torch.nn`` modules: the pure function, its parameters, its state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .output import Output

State = dict[str, Tensor]


class ModuleStage(NamedTuple):
    """A module as a pure function.

    Args:
        fn: ``(params, x) -> y`` for a module without buffers, else ``(params, x, state) -> Output(y, state=new)``.
            A side input of the stage comes before the state.
        params: the parameters by name, detached; those of the module are not copied.
        state: the buffers by name.
    """

    fn: Callable[..., Any]
    params: State
    state: State


def stage_from_module(module: nn.Module) -> ModuleStage:
    """The pure function that ``module`` computes, in the mode (training or evaluation) that it has when a step begins.

    A tuple ``x`` becomes positional arguments, a dictionary with texts as keys keyword arguments,
    anything else the one argument; a side input becomes further arguments in the same way. A parameter
    known by two names is listed once, under the first, and gets one gradient; one that requires no
    gradient is frozen: it gets zeros. Buffers go into a step as ``state={stage: state}``, and come back,
    with ``has_aux=True``, as ``aux.state[stage]``.

    Args:
        module: any module; it is not changed, by the call neither.

    References:
        ``torch.func.functional_call``.

    >>> fn, params, state = stage_from_module(nn.Linear(3, 2))
    >>> sorted(params), state, fn(params, torch.zeros(5, 3)).shape
    (['bias', 'weight'], {}, torch.Size([5, 2]))
    """
    params = {name: p.detach() for name, p in module.named_parameters()}
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    state = {name: b.detach() for name, b in module.named_buffers()}

    def call(tensors: State, given: tuple[Any, ...]) -> Any:
        args, kwargs = (), {}
        for x in given:
            if isinstance(x, dict):
                kwargs |= x
            else:
                args += x if type(x) is tuple else (x,)
        for name in frozen:
            tensors[name] = tensors[name].detach()
        return torch.func.functional_call(module, tensors, args, kwargs)

    def plain(params: State, *given: Any) -> Any:
        return call(dict(params), given)

    def stateful(params: State, *given: Any) -> Output:
        *given, buffers = given
        if not (isinstance(buffers, dict) and buffers.keys() == state.keys()):
            raise ValueError(f"the module has the buffers {', '.join(state)}; give them as its state, after x")
        tensors = params | {name: b.clone() for name, b in buffers.items()}
        y = call(tensors, given)
        # The call leaves in ``tensors`` what a module has put in the place of a buffer.
        return Output(y, state={name: tensors[name].detach() for name in state})

    fn = stateful if state else plain
    fn.mode = lambda: tuple(m.training for m in module.modules())  # a step traces anew where it changes
    return ModuleStage(fn, params, state)


def split_sequential(module: nn.Sequential | nn.ModuleList, boundaries: Sequence[int]) -> list[nn.Sequential]:
    """Cut a chain of modules before the given positions, without copying anything.

    Args:
        module: modules to be applied one after the other.
        boundaries: position of the first module of every stage but the first, ascending.

    Returns:
        ``len(boundaries) + 1`` modules, one per stage; an empty one does nothing.

    Raises:
        ValueError: positions out of order or out of range.

    >>> layers = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> [len(part) for part in split_sequential(layers, [1, 1])]
    [1, 0, 2]
    """
    edges = [0, *boundaries, len(module)]
    if any(a > b for a, b in zip(edges, edges[1:], strict=False)):
        raise ValueError(
            f"got the boundaries {list(boundaries)}, expected ascending positions between 0 and {len(module)}"
        )
    return [nn.Sequential(*(module[i] for i in range(a, b))) for a, b in zip(edges, edges[1:], strict=False)]
