"""Take the stages of a ``torch.distributed.pipelining.Pipe``, which torch has cut already."""

import operator
from typing import Any

import torch
from torch import Tensor, nn


class PipeModule(nn.Module):
    """The stages of a ``Pipe`` as the parts of one module, which calls them as the pipe's graph says.

    Parameters and buffers have the names of the model that torch has cut. A single result is not in a tuple,
    as a schedule of torch hands it to the loss.

    Args:
        pipe: its stages keep their names, such as ``submod_pp_0``. Copies of one parameter in several of its
            stages become one parameter again; otherwise it is left unmodified.

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
        stages = dict(pipe.split_gm.named_children())
        self.stages = tuple(stages)
        for copies in pipe.replicated_params:
            (first, name), *others = copies.items()
            for stage, other in others:
                home, _, key = other.rpartition(".")
                stages[stage].get_submodule(home)._parameters[key] = stages[first].get_parameter(name)
        # The first name of a tensor counts: that of the model.
        for stage in stages.values():
            for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
                self._hold(name, tensor)
        self._names = {*dict(self.named_parameters()), *dict(self.named_buffers())}
        for name, stage in stages.items():
            self.add_module(name, stage)

    def _hold(self, name: str, tensor: Tensor) -> None:
        """Register a tensor of a stage under the name that it has in the model."""
        *path, key = name.split(".")
        home: nn.Module = self
        for part in path:
            if part not in home._modules:
                home.add_module(part, nn.Module())
            home = home.get_submodule(part)
        if isinstance(tensor, nn.Parameter):
            home.register_parameter(key, tensor)
        elif key not in home._buffers:  # each stage that reads a buffer has a copy
            home.register_buffer(key, tensor)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the model that torch has cut."""
        every = super().state_dict(*args, **kwargs)
        return {name: tensor for name, tensor in every.items() if name in self._names}

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
                    results = nodes[0]
                    return results[0] if isinstance(results, tuple) and len(results) == 1 else results
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
