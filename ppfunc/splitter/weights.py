"""Make the weights of stages: read them from files, or draw them. Name them as the model does."""

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from difflib import get_close_matches
from functools import partial
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ppfunc._checks import require_stages, require_type
from ppfunc.stage._torch import storage, version
from ppfunc.stage.layout import layout_of, whole
from ppfunc.stage.process import process_lock

from .cut import Source
from .trace import Tensors

Trees = Mapping[int, Mapping[str, Tensor]]
Init = Callable[[str, Tensor, torch.Generator], object]


def read_weights(
    source: Source,
    params: Trees,
    state: Trees,
    weights: str | PathLike[str] | Mapping[str, Tensor],
    stages: Iterable[int] | None,
    dtype: torch.dtype | None,
) -> tuple[dict[int, dict[str, Tensor]], dict[int, dict[str, Tensor]], dict[str, Tensor]]:
    """Read the parameters, the state and the constant buffers of some stages, each tensor once.

    Returns:
        Parameters and state by stage, and by name the buffers that are only read.

    Raises:
        KeyError, ValueError: see `Split.load`.
    """
    numbers, tensors = _numbers(stages, source.stages), Tensors.of(source.model)
    require_type(
        "weights", weights, str | PathLike | Mapping, "a safetensors file, a folder of them, or a state dict"
    )
    files: Mapping[str, Path] = {}
    if isinstance(weights, Mapping):
        for name, weight in weights.items():
            require_type(f"weights: the name {name!r}", name, str, "a text")
            require_type(name, weight, Tensor, "a tensor")
    else:
        files = _files(Path(weights))
    held = weights if isinstance(weights, Mapping) else files
    aliases: dict[str, list[str]] = {}
    for place, name in tensors.places.items():
        aliases.setdefault(name, []).append(place)
    done: dict[str, Tensor] = {}

    def find(name: str) -> str | None:
        return next((n for n in (name, *aliases.get(name, ())) if n in held), None)

    def load(name: str, like: Tensor, wanted: torch.dtype | None = None) -> Tensor:
        if name not in done:
            entry = find(name)
            if entry is None:
                near = ", ".join(get_close_matches(name, held, n=3)) or "none"
                raise KeyError(
                    f"{name} is not among the {len(held)} tensors of the weights; the nearest names are:"
                    f" {near}"
                )
            if layout_of(like) is not None:
                raise TypeError(
                    f"{name}: the model has a DTensor, expected a plain tensor; load the weights into the"
                    " model before it is laid out"
                )
            to = wanted if wanted and like.is_floating_point() else like.dtype
            if isinstance(weights, Mapping):
                done[name] = _fitted(name, weights[entry].detach(), like, to)
            else:
                # All that was read of an open file stays in memory.
                with _opened(files[entry]) as file, torch.device("cpu"):
                    done[name] = _fitted(name, file.get_tensor(entry), like, to)
        return done[name]

    loaded = {s: {name: load(name, t, dtype) for name, t in params[s].items()} for s in numbers}
    states = {s: {name: load(name, t) for name, t in state[s].items()} for s in numbers if s in state}
    read_only = {name: tensors.buffers[name] for s in numbers for name in source.held[s].constants}
    buffers = {name: load(name, buffer) for name, buffer in read_only.items() if find(name)}
    return (
        loaded,
        states,
        buffers
        | _initialised(source.model, [n for n, b in read_only.items() if b.is_meta and n not in buffers]),
    )


def _initialised(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Make the buffers that no file has. Call ``_init_weights``, as models of transformers do."""
    initialise = getattr(model, "_init_weights", None)
    values: dict[str, Tensor] = {}
    if initialise is None:
        return values
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in names):
        twin = _twin(model.get_submodule(owner))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            initialise(twin)
        values |= {
            f"{owner}.{key}".lstrip("."): b
            for key, b in twin._buffers.items()
            if b is not None and version(b)
        }
    return {name: values[name] for name in names if name in values}


def draw_weights(
    source: Source,
    params: Trees,
    stages: Iterable[int] | None,
    seed: int,
    init: Init | None,
    device: torch.device | str,
) -> dict[int, dict[str, Tensor]]:
    """Draw the parameters of some stages that are on ``meta``, module by module.

    Raises:
        ValueError: nothing writes a parameter, or there is no such stage.
    """
    numbers = _numbers(stages, source.stages)
    wanted = {name: p for stage in numbers for name, p in params[stage].items()}
    done = {name: p for name, p in wanted.items() if not p.is_meta}
    for name in wanted:
        if name not in done:
            made = _drawn(source.model, name.rpartition(".")[0], seed, init)
            done |= {n: _laid_as(wanted[n], p.to(device)) for n, p in made.items() if n in wanted}
    return {stage: {name: done[name] for name in params[stage]} for stage in numbers}


def _drawn(model: nn.Module, path: str, seed: int, init: Init | None) -> dict[str, Tensor]:
    """Draw the parameters that a module has itself, whole; return them by their names in the model."""
    twin = _twin(model.get_submodule(path))
    resets = (getattr(twin, name, None) for name in ("reset_parameters", "_reset_parameters"))
    functions: list[Callable[[], Any]] = [*filter(callable, resets)][:1]
    initialise = getattr(model, "_init_weights", None)
    if callable(initialise) and len(inspect.signature(initialise).parameters) == 1:
        functions.append(partial(initialise, twin))
    with process_lock, torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(_hash(seed, path))
        for function in functions:
            function()
    values = {f"{path}.{key}".lstrip("."): p for key, p in twin._parameters.items() if p is not None}
    for name, p in values.items():
        before = version(p)
        if init is not None:
            with torch.no_grad():
                init(name, p, torch.Generator().manual_seed(_hash(seed, name)))
        if not before and not version(p) and p.numel():
            raise ValueError(
                f"nothing gives {name} its values: {type(twin).__name__} has no reset_parameters() that"
                " writes it; give init=, a function of name, tensor and generator that does"
            )
    return {name: p.detach() for name, p in values.items()}


def _twin(module: nn.Module) -> nn.Module:
    """Copy a module, with its own parameters and buffers on the CPU, without values."""
    twin = copy(module)
    twin._parameters = {
        key: None
        if p is None
        else nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="cpu"), p.requires_grad)
        for key, p in module._parameters.items()
    }
    twin._buffers = {
        key: None if b is None else torch.empty_like(b, device="cpu") for key, b in module._buffers.items()
    }
    return twin


def _laid_as(like: Tensor, leaf: Tensor) -> Tensor:
    """Lay a whole leaf out as another tensor is: of a DTensor, as this rank's part."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor):
        return leaf
    # Without a source every rank cuts its own copy: nothing is sent.
    return distribute_tensor(leaf, like.device_mesh, like.placements, src_data_rank=None)


def _hash(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big", signed=True)


def _numbers(stages: Iterable[int] | None, count: int) -> list[int]:
    return sorted(require_stages("stages", range(count) if stages is None else stages, count))


def overlapping(tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Find two names of tensors that share memory.

    Returns:
        The names; None where no two tensors do.
    """
    spans: dict[int | None, list[tuple[Any, Any, str]]] = {}  # first and last byte
    for name, t in tensors.items():
        if t.numel():
            start = int(t.storage_offset()) * t.itemsize
            end = (
                start
                + int(sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) + 1)
                * t.itemsize
            )
            spans.setdefault(storage(t), []).append((start, end, name))
    for sharing in spans.values():
        for (_, end, one), (start, _, other) in pairwise(sorted(sharing)):
            if start < end:
                return one, other
    return None


def join(
    params: Trees, state: Trees | None, tied: Mapping[str, Sequence[tuple[int, str]]]
) -> dict[str, Tensor]:
    """Collect all tensors by name.

    Raises:
        ValueError: the places of a tied parameter differ.
    """
    for name, places in tied.items():
        values = [params[stage][key] for stage, key in places if stage in params]
        if any(values[0] is not other and not torch.equal(values[0], other) for other in values[1:]):
            raise ValueError(
                f"{name} is tied, and its places in the stages {', '.join(str(s) for s, _ in places)} differ;"
                " give each the sum"
            )
    return {name: t for trees in (params, state or {}) for tree in trees.values() for name, t in tree.items()}


def put_back(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy tensors into a model, by name.

    Raises:
        ValueError: a tensor of the model has another shape, or no values.
    """
    tensors = Tensors.of(model)
    targets = {**tensors.params, **tensors.buffers}
    for name, value in values.items():
        if name not in targets or targets[name].shape != value.shape:
            got = list(targets[name].shape) if name in targets else "none"
            raise ValueError(
                f"{name}: the model has {got}, expected one of shape {list(value.shape)}; give the model that"
                " was split"
            )
        if targets[name].is_meta:
            raise ValueError(
                f"{name} of the model is on the device meta; use"
                " model.load_state_dict(split.state_dict(params, state), assign=True)"
            )
    with torch.no_grad():
        for name, value in values.items():
            parts = layout_of(value) is not None and layout_of(targets[name]) is None
            targets[name].copy_(whole(value) if parts else value)


def state_dict(source: Source, values: Mapping[str, Tensor], whole: bool) -> dict[str, Tensor]:
    """Select the values that are entries of the model's state dict.

    With ``whole``, the other entries come from the model.
    """
    tensors = Tensors.of(source.model)
    entries = {}
    for name, tensor in source.model.state_dict().items():
        first = tensors.places.get(name, name)
        if first in values:
            entries[name] = values[first]
        elif whole:
            entries[name] = source.loaded.get(first, tensor)
    return entries


def _fitted(name: str, weight: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy a weight to the device of another tensor.

    Raises:
        ValueError: the model has another shape, or integers where the weights have other numbers.
    """
    if weight.shape != like.shape:
        raise ValueError(
            f"{name}: the weights have the shape {list(weight.shape)}, the model has {list(like.shape)};"
            " give the weights of this model"
        )
    if weight.is_floating_point() and not (like.is_floating_point() or like.is_complex()):
        raise ValueError(
            f"{name}: the weights have the dtype {weight.dtype}, the model has {like.dtype}; convert the"
            " weights"
        )
    return weight.to("cpu" if like.is_meta else like.device, dtype, copy=True)


def _files(path: Path) -> dict[str, Path]:
    """Find the file of each tensor."""
    if path.is_dir():
        indexes, single = sorted(path.glob("*.safetensors.index.json")), sorted(path.glob("*.safetensors"))
        if len(indexes) == 1:
            files = json.loads(indexes[0].read_text())["weight_map"]
            return {name: path / file for name, file in files.items()}
        if len(single) != 1:
            raise ValueError(
                f"weights: got the folder {path} with {len(single)} files *.safetensors and {len(indexes)}"
                " indexes; expected one of either"
            )
        path = single[0]
    with _opened(path) as file:
        return dict.fromkeys(file.keys(), path)


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, FileNotFoundError) as error:
        raise ValueError(
            f"weights: {path} is no safetensors file: {error}; give one, a folder of them, or a state dict"
        ) from None
