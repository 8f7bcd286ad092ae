"""Private and unstable names of torch that training uses, each with its purpose.

``tests/test_torch_names.py`` says which of them another torch than 2.13 has not.
"""

from typing import Any

import torch

from ppfunc.stage._torch import transforming
from ppfunc.stage.tree import tree_leaves

# Optimizers as single kernels over lists of tensors of one device and dtype, with ``found_inf``.
fused_adamw = torch._fused_adamw_
fused_sgd = torch._fused_sgd_

# Arithmetic on lists of tensors in few kernels; those with ``into`` write into the first list.
add_into_each = torch._foreach_add_
copy_into_each = torch._foreach_copy_
multiply_into_each = torch._foreach_mul_
norms_of_each = torch._foreach_norm

# Change a loss scale and its count of good steps in place:
# ``(scale, good, found_inf, growth, backoff, interval)``.
update_scale = torch._amp_update_scale_


def looked_through(trees: Any) -> bool:
    """Tell whether a transform or autograd sees the computations on these trees.

    Parameters of modules are values: who trains them wants no graph from step to step.
    """
    if transforming() or torch.autograd.forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(
        isinstance(leaf, torch.Tensor) and leaf.requires_grad and not isinstance(leaf, torch.nn.Parameter)
        for leaf in tree_leaves(trees)
    )


def users_of(storage: torch.UntypedStorage) -> int:
    """Count the holders of the memory of a storage, this object included."""
    return torch._C._storage_Use_Count(storage._cdata)


def shape_and_offset(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's part of a DTensor, and its offset in the whole."""
    from torch.distributed.tensor._utils import (  # here, because the import takes long
        compute_local_shape_and_global_offset,
    )

    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


def place_in_file(file: str, begin: int, size: int) -> Any:
    """Place bytes in a file of ``torch.distributed.checkpoint``, as its ``.metadata`` has it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # here, because the import takes long

    return _StorageInfo(file, begin, size)
