"""Read the weights of the stages of a split from files, and give them back under the names of the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from difflib import get_close_matches
from functools import cache, partial
from itertools import pairwise
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from ppfunc.stage._torch import storage, version

from .source import Source
from .trace import Tensors

Trees = Mapping[int, Mapping[str, Tensor]]
Read = Callable[[str], Tensor]


def by_stage(homes: Mapping[str, int], values: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Tensors by stage, of the stages that have some."""
    return {stage: {name: values[name] for name, home in homes.items() if home == stage} for stage in sorted(set(homes.values()))}


def read_weights(
    source: Source, params: Trees, state: Trees, weights: str | PathLike[str] | Mapping[str, Tensor], stages: Sequence[int]
) -> tuple[dict[int, dict[str, Tensor]], dict[int, dict[str, Tensor]], dict[str, Tensor]]:
    """Read the parameters, the state and the other buffers of some stages, each tensor once.

    Returns:
        Parameters and state by stage, and by name the buffers that are only read.

    Raises:
        KeyError, ValueError: see `Split.load`.
    """
    if bad := [stage for stage in stages if stage not in range(source.stages)]:
        raise ValueError(f"stages: got {bad[0]}, the split has the stages 0 to {source.stages - 1}")
    tensors = Tensors.of(source.model)
    held, read = _mapping_reader(weights) if isinstance(weights, Mapping) else _file_reader(Path(weights))
    aliases: dict[str, list[str]] = {}
    for place, name in tensors.places.items():
        aliases.setdefault(name, []).append(place)
    done: dict[str, Tensor] = {}

    def find(name: str) -> str | None:
        return next((n for n in (name, *aliases.get(name, ())) if n in held), None)

    def load(name: str, like: Tensor) -> Tensor:
        if name not in done:
            found = find(name)
            if found is None:
                near = ", ".join(get_close_matches(name, held, n=3)) or "none"
                raise KeyError(f"{name} is not among the {len(held)} tensors of the weights; the nearest names are: {near}")
            done[name] = _fit(read(found), like, name)
        return done[name]

    loaded = {s: {name: load(name, t) for name, t in params[s].items()} for s in stages}
    states = {s: {name: load(name, t) for name, t in state[s].items()} for s in stages if s in state}
    constants = {name: tensors.buffers[name] for name in source.constants(stages)}
    buffers = {name: load(name, buffer) for name, buffer in constants.items() if find(name)}
    return loaded, states, buffers | _initialised(source.model, [n for n, b in constants.items() if b.is_meta and n not in buffers])


def _initialised(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """The values of buffers that no file has, by the function with which models of transformers initialise a module."""
    initialise = getattr(model, "_init_weights", None)
    found: dict[str, Tensor] = {}
    if initialise is None:
        return found
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in names):
        twin = copy(model.get_submodule(owner))
        twin._buffers = {key: None if b is None else torch.empty_like(b, device="cpu") for key, b in twin._buffers.items()}
        twin._parameters = dict.fromkeys(twin._parameters)
        with torch.no_grad():
            initialise(twin)
        found |= {f"{owner}.{key}".lstrip("."): b for key, b in twin._buffers.items() if b is not None and version(b)}
    return {name: found[name] for name in names if name in found}


def overlapping(tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Two names of tensors that share memory; None where there are none."""
    spans: dict[int | None, list[tuple[int, int, str]]] = {}
    for name, t in tensors.items():
        if t.numel():
            start = int(t.storage_offset()) * t.itemsize
            end = start + int(sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) + 1) * t.itemsize
            spans.setdefault(storage(t), []).append((start, end, name))
    for found in spans.values():
        for (_, end, one), (start, _, other) in pairwise(sorted(found)):
            if start < end:
                return one, other
    return None


def join(params: Trees, state: Trees | None, tied: Mapping[str, Sequence[tuple[int, str]]]) -> dict[str, Tensor]:
    """All tensors by name.

    Raises:
        ValueError: the places of a tied parameter differ.
    """
    for name, places in tied.items():
        found = [params[stage][key] for stage, key in places if stage in params]
        if any(found[0] is not other and not torch.equal(found[0], other) for other in found[1:]):
            raise ValueError(
                f"{name} is tied, and its places in the stages {', '.join(str(s) for s, _ in places)} differ; give each the sum"
            )
    return {name: t for trees in (params, state or {}) for tree in trees.values() for name, t in tree.items()}


def put_back(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy tensors into a model, by name."""
    tensors = Tensors.of(model)
    own = {**tensors.params, **tensors.buffers}
    for name, value in values.items():
        if name not in own or own[name].shape != value.shape:
            got = list(own[name].shape) if name in own else "none"
            raise ValueError(f"{name}: the model has {got}, expected one of shape {list(value.shape)}; give the model that was split")
        if own[name].is_meta:
            raise ValueError(f"{name} of the model is on the device meta; use model.load_state_dict(split.state_dict(params), assign=True)")
    with torch.no_grad():
        for name, value in values.items():
            own[name].copy_(value)


def state_dict(source: Source, values: Mapping[str, Tensor], whole: bool) -> dict[str, Tensor]:
    """The entries of the model's state dict that are among the values; where ``whole``, all of them."""
    tensors = Tensors.of(source.model)
    found = {}
    for name, own in source.model.state_dict().items():
        first = tensors.places.get(name, name)
        if first in values:
            found[name] = values[first]
        elif whole:
            found[name] = source.loaded.get(first, own)
    return found


def _fit(tensor: Tensor, like: Tensor, name: str) -> Tensor:
    """A tensor as the model has it: of its shape, dtype and device."""
    if tensor.shape != like.shape:
        raise ValueError(f"{name}: the weights have the shape {list(tensor.shape)}, the model has {list(like.shape)}")
    return tensor.detach().to(device="cpu" if like.is_meta else like.device, dtype=like.dtype)


def _mapping_reader(weights: Mapping[str, Tensor]) -> tuple[Collection[str], Read]:
    return set(weights), weights.__getitem__


def _file_reader(path: Path) -> tuple[Collection[str], Read]:
    """The names in safetensors files, and a function that reads one tensor."""
    from safetensors import safe_open

    files: dict[str, Path] = {}
    if path.is_dir():
        indexes = sorted(path.glob("*.safetensors.index.json"))
        if len(indexes) == 1:
            files = {name: path / file for name, file in json.loads(indexes[0].read_text())["weight_map"].items()}
        single = sorted(path.glob("*.safetensors"))
        if not files and len(single) != 1:
            raise ValueError(
                f"weights: got the folder {path} with {len(single)} files *.safetensors and {len(indexes)} indexes; expected one of either"
            )
        path = path if files else single[0]
    if not files:
        with safe_open(path, framework="pt") as file:
            files = dict.fromkeys(file.keys(), path)
    opened = cache(partial(safe_open, framework="pt"))

    def read(name: str) -> Tensor:
        tensor: Tensor = opened(files[name]).get_tensor(name)
        return tensor

    return files.keys(), read
