"""Put tangents beside parameters and batches, as transformed stages take them, and zeros where there are none."""

from collections.abc import Mapping
from typing import Any

import torch

from ppfunc.runtime import Microbatches
from ppfunc.stage.signature import differentiable
from ppfunc.stage.transforms.tangents import flatten_tangents
from ppfunc.stage.tree import tree_flatten


def by_stage(trees: Any, name: str) -> Mapping[int, Any]:
    """The trees, which are given by stage; raises TypeError for something else."""
    if not isinstance(trees, Mapping):
        raise TypeError(f"{name}: got {type(trees).__name__}, expected a dictionary {{stage: tree}}")
    return trees


def paired(params: Any, tangents: Any) -> dict[int, tuple[Any, Any]]:
    """Every tree of parameters with its tangents, zeros where none are given: what moves may change from step to step."""
    params, tangents = by_stage(params, "params"), by_stage(tangents, "tangents")
    if set(params) != set(tangents):
        raise ValueError(
            f"tangents: got the stages {list(tangents)} for parameters of the stages {list(params)}; give a tree, or None, for each"
        )
    return {stage: (tree, _with_zeros(tree, tangents[stage], f"params[{stage}]")) for stage, tree in params.items()}


def moving(inputs: Any, input_tangents: Any = None) -> Any:
    """The batch with its tangents, zeros where none are given, in the form of the batch."""
    if inputs is None or not isinstance(inputs, Microbatches):
        return None if inputs is None else (inputs, _with_zeros(inputs, input_tangents, "inputs"))
    rows = [None] * len(inputs) if input_tangents is None else input_tangents
    if not isinstance(rows, list | Microbatches) or len(rows) != len(inputs):
        got = f"{len(rows)} microbatches" if isinstance(rows, Microbatches) else type(rows).__name__
        raise ValueError(f"input_tangents: got {got}, expected {len(inputs)} microbatches, as the inputs are")
    return Microbatches((x, _with_zeros(x, row, f"inputs[{i}]")) for i, (x, row) in enumerate(zip(inputs, rows, strict=True)))


def unmoved(inputs: Any) -> Any:
    """The batch with None for tangents, in the form of the batch."""
    if isinstance(inputs, Microbatches):
        return inputs.map(lambda x: (x, None))
    return None if inputs is None else (inputs, None)


def _with_zeros(primal: Any, tangents: Any, name: str) -> Any:
    """The tangents with zeros for None where there could be a tangent."""
    leaves, treedef = tree_flatten(primal)
    given = flatten_tangents(primal, tangents, name)
    return treedef.unflatten(
        torch.zeros_like(leaf) if tangent is None and differentiable(leaf.dtype) else tangent
        for leaf, tangent in zip(leaves, given, strict=True)
    )


def completed(gradients: Any, params: Any) -> Any:
    """The gradients with zeros for the leaves that have none."""
    leaves, treedef = tree_flatten(params)
    given = treedef.flatten_up_to(gradients)
    return treedef.unflatten(torch.zeros_like(p) if g is None else g for p, g in zip(leaves, given, strict=True))
