"""Tell what a call of an operator reads and writes, beside what its schema says."""

from __future__ import annotations

from typing import Any

import torch

from ppfunc.stage._torch import OpOverload, schema, storage
from ppfunc.stage.purity import tensors_in

aten = torch.ops.aten

# Operators that write into running statistics, their arguments 3 and 4, if argument 5 is true, without declaring it.
_STATISTICS = {
    aten.batch_norm.default,
    aten.instance_norm.default,
    aten.native_batch_norm.default,
    aten.cudnn_batch_norm.default,
    aten.miopen_batch_norm.default,
}


def written(func: OpOverload, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that a call writes into."""
    given = dict(zip([a.name for a in schema(func).arguments], args, strict=False)) | kwargs
    values = [given.get(a.name) for a in schema(func).arguments if a.alias_info is not None and a.alias_info.is_write]
    if func in _STATISTICS and args[5]:
        values += args[3:5]
    return tensors_of(values)


# Operators that look at the form of an argument alone, with those that make the same of numbers.
_FACTORIES = {
    aten.empty_like.default: aten.empty.memory_format,
    aten.zeros_like.default: aten.zeros.default,
    aten.ones_like.default: aten.ones.default,
    aten.full_like.default: aten.full.default,
    aten.new_empty.default: aten.empty.memory_format,
    aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default,
}


def by_numbers(func: OpOverload, args: Any, kwargs: Any, made: Any) -> tuple[OpOverload, Any, Any]:
    """The same call without tensors that are read for their form alone: a mask of ``ones_like(h)`` does not depend on ``h``."""
    if func is aten.lift_fresh.default:
        return aten.lift_fresh_copy.default, args, kwargs
    if func in _FACTORIES and made.layout is torch.strided and made.is_contiguous():
        given = dict(zip([a.name for a in schema(func).arguments], args, strict=False)) | kwargs
        value = [given["fill_value"]] if "fill_value" in given else []
        return _FACTORIES[func], (list(made.shape), *value), {"dtype": made.dtype, "device": made.device}
    if func in (aten.expand_as.default, aten.view_as.default):
        return aten.expand.default if func is aten.expand_as.default else aten.view.default, (args[0], list(made.shape)), {}
    if func is aten.type_as.default or (func is aten.to.other and len(args) == 2 and not kwargs):
        return aten.to.dtype, (args[0], made.dtype), {}
    return func, args, kwargs


def storages(tensors: list[torch.Tensor]) -> frozenset[int]:
    """The memories of tensors; sparse ones have none."""
    return frozenset(at for at in map(storage, tensors) if at is not None)


def tensors_of(values: Any) -> list[torch.Tensor]:
    """The tensors among the arguments or results of an operator."""
    return list(tensors_in(values))


def replaced(values: Any, by: dict[int, Any]) -> Any:
    """The arguments with other tensors in the places of tensors."""
    if isinstance(values, torch.Tensor):
        return by[id(values)]
    if isinstance(values, list | tuple):
        return type(values)(replaced(v, by) for v in values)
    return {k: replaced(v, by) for k, v in values.items()} if isinstance(values, dict) else values
