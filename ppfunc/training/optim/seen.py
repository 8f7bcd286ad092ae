"""Tell whether somebody looks through a computation."""

from typing import Any

import torch
from torch import Tensor, nn

from ppfunc.stage._torch import transforming
from ppfunc.stage.tree import tree_leaves

from .._torch import forward_level


def looked_through(trees: Any) -> bool:
    """Tell if a transform or autograd sees what is computed of these trees.

    Parameters of modules are values: who trains them wants no graph from step to step.
    """
    if transforming() or forward_level() >= 0:
        return True
    return torch.is_grad_enabled() and any(
        isinstance(leaf, Tensor) and leaf.requires_grad and not isinstance(leaf, nn.Parameter)
        for leaf in tree_leaves(trees)
    )
