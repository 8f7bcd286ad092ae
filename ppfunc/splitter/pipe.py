"""Take the stages of a ``torch.distributed.pipelining.Pipe``, which torch has cut already."""

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

    graph_module: torch.fx.GraphModule

    def __init__(self, pipe: Any) -> None:
        super().__init__()
        if pipe.has_loss_and_backward:
            raise ValueError(
                "model: got a Pipe with a loss of its own; make it without loss_spec, and give the loss to"
                " the step"
            )
        self.__dict__["graph_module"] = pipe.split_gm  # no submodule: its stages are
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
        remaining, places = iter(args), self.graph_module.graph.find_nodes(op="placeholder")
        values = [kwargs[n.target] if n.target in kwargs else next(remaining) for n in places]
        results = torch.fx.Interpreter(self.graph_module).run(*values)
        return results[0] if isinstance(results, tuple) and len(results) == 1 else results


def as_pipe(model: Any) -> PipeModule | None:
    """Wrap a ``Pipe`` as a module; return None for anything else."""
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(model).__mro__}
    return PipeModule(model) if "torch.distributed.pipelining._IR.Pipe" in kinds else None
