"""Take the stages of a ``torch.distributed.pipelining.Pipe``, which torch has cut already."""

import operator
from typing import Any

import torch
from torch import nn


class PipeModule(nn.Module):
    """The stages of a ``Pipe`` as the parts of one module, which calls them as the pipe's graph says.

    Args:
        pipe: it is left unmodified. Its stages keep their names, such as ``submod_pp_0``.

    Raises:
        ValueError: it has a loss and a backward of its own.
    """

    def __init__(self, pipe: Any) -> None:
        super().__init__()
        if pipe.has_loss_and_backward:
            raise ValueError(
                "model: got a Pipe with a loss of its own; make it without loss_spec, and give the loss to"
                " the step"
            )
        self.graph = pipe.split_gm.graph
        for name, stage in pipe.split_gm.named_children():
            self.add_module(name, stage)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the stages in turn."""
        remaining = iter(args)
        values: dict[torch.fx.Node, Any] = {}
        for node in self.graph.nodes:
            nodes, named = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
            match node.op:
                case "placeholder":
                    values[node] = kwargs[node.target] if node.target in kwargs else next(remaining)
                case "call_module":
                    values[node] = self.get_submodule(node.target)(*nodes, **named)
                case "call_function" if node.target is operator.getitem:
                    values[node] = nodes[0][nodes[1]]
                case "output":
                    return nodes[0]
                case _:
                    raise ValueError(
                        f"model: got a Pipe whose graph has {node.op} {node.target}, expected calls of stages"
                        " alone"
                    )
        raise ValueError("model: got a Pipe whose graph returns nothing")


def as_pipe(model: Any) -> PipeModule | None:
    """Wrap a ``Pipe`` as a module; return None for anything else."""
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(model).__mro__}
    return PipeModule(model) if "torch.distributed.pipelining._IR.Pipe" in kinds else None


def replicas(pipe: Any, params: dict[int, dict[str, torch.Tensor]]) -> dict[str, tuple[tuple[int, str], ...]]:
    """Find the parameters that a ``Pipe`` has copied into several stages.

    Each is named after its first place.
    """
    stage_of = {name: stage for stage, tree in params.items() for name in tree}
    copies_of = {}
    for copies in pipe.replicated_params:
        names = [f"{stage}.{name}" for stage, name in copies.items()]
        places = sorted((stage_of[name], name) for name in names if name in stage_of)
        if len(places) > 1:
            copies_of[places[0][1]] = tuple(places)
    return copies_of
