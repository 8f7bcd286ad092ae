"""Hold a model cut into stages: the value `Split`, its stage functions, and its weights, which are read from
files, or drawn, and named as the model does.

Steps ask whether stages are a `Split`. The modules that trace are imported when a model is split.
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from ppfunc._checks import naming_arguments, naming_attributes, not_copied, require_stages, require_type
from ppfunc.stage._torch import version
from ppfunc.stage.abstract.captures import READS
from ppfunc.stage.constants import with_constants, without_constants
from ppfunc.stage.errors import StageError
from ppfunc.stage.frozen import detached, note_parameters
from ppfunc.stage.layout import Boundary, as_dtensor, declaring, layout_of, whole
from ppfunc.stage.process import process_lock
from ppfunc.stage.program import WITHOUT_CARRY, Output
from ppfunc.stage.tree import tree_map

from .cache import CacheForm, Carry
from .call import LeafForm, Tensors, read_call

if TYPE_CHECKING:
    from .cut import Source

Params = Mapping[int, Mapping[str, Tensor]]


Init = Callable[[str, Tensor, torch.Generator], object]


@naming_attributes
@dataclass(frozen=True, eq=False)
class Split:
    """A model cut into stages.

    Args:
        stages: the pure function of each stage, ``fn(params, x) -> y``; ``fn(params, x, state) -> Output``
            for a stage with a state, and ``fn(params, x, carry) -> Output`` with slices. The last returns the
            output of the model, in the model's own class. Parts of it that are neither tensors nor plain
            values, such as a cache, raise when they are used.
        params: ``{stage: {name: tensor}}``, by the model's own names, detached; the model's tensors are not
            copied. A tied parameter is in every stage that reads it, under its first name, as the same
            tensor.
        state: ``{stage: {name: tensor}}``, the buffers that the model writes into, and those that were asked
            for, of the stages that have some.
        tied: ``{name: ((stage, name), ...)}``: the places of every parameter that several stages read. The
            gradient of the parameter is the sum of those at its places.
        skips: ``(source, destination)`` of the values that travel further than to the next stage; see
            `ppfunc.with_skips`.
        unused: the parameters that no stage reads.
        at: the names of the modules that begin the stages after the first.
    """

    stages: tuple[Callable[..., Any], ...]
    params: dict[int, dict[str, Tensor]]
    state: dict[int, dict[str, Tensor]]
    tied: dict[str, tuple[tuple[int, str], ...]]
    skips: tuple[tuple[int, int], ...]
    unused: tuple[str, ...]
    at: tuple[str, ...]
    _source: "Source" = field(repr=False)

    def __repr__(self) -> str:
        sizes = ", ".join(
            str(sum(t.numel() for t in tree.values())) for _, tree in sorted(self.params.items())
        )
        cuts = f", cut at {', '.join(self.at)}" if self.at else ""
        cuts += f", and the encoder {self.encoder}" if self.encoder else ""
        tied = f", tied {', '.join(self.tied)}" if self.tied else ""
        return (
            f"<split of {type(self.model).__name__} into {len(self.at) + 1} stages{cuts};"
            f" parameters {sizes}{tied}>"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "a split is not called as its model is;"
            " pp.evaluate(split, None, schedule, return_outputs=True) makes a step that runs it"
        )

    __reduce__ = not_copied(
        "a split",
        "save split.state_dict(split.params, split.state) or, by ppfunc.checkpoint.save, a state, and split"
        " the model in each process",
    )

    @property
    def model(self) -> nn.Module:
        """Return the model that was split."""
        return self._source.model

    @property
    def encoder(self) -> str:
        """Return the name of the module that is the last stage, the encoder; empty without."""
        return self._source.tower

    def load(
        self,
        weights: str | PathLike[str] | Mapping[str, Tensor],
        stages: Iterable[int] | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> "Split":
        """Read the weights of some stages from files.

        A model on ``meta`` is never materialised whole.

        Args:
            weights: a safetensors file, a folder of them with or without an index, or a state dict. Names are
                the model's; of a tied parameter any of its names will do.
            stages: the stages to read, those of this process; all by default.
            dtype: the dtype of the floating parameters, by default their dtypes in the model.
                ``torch.float32`` keeps what a model in bfloat16 would round: give it to a trainer with
                ``Precision(compute=torch.bfloat16, master=torch.float32)``.

        Returns:
            A split whose ``params`` and ``state`` have these stages alone. Other tensors have the dtypes of
            the model. They are on the device of its tensors, or on the CPU where those are on ``meta``;
            buffers that are only read are loaded too, of these stages, where the files have them.

        Raises:
            KeyError: a tensor is not there.
            TypeError: not weights, not numbers of stages, or not a floating dtype.
            ValueError: a tensor has another shape, or a file is no safetensors file.
        """
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dtype: got {dtype!r}, expected a floating dtype such as torch.float32")
        params, state, buffers = _read_weights(self._source, self.params, self.state, weights, stages, dtype)
        source = self._source.with_buffers(buffers)
        functions = tuple(make_stage(source, stage) for stage in range(len(self.stages)))
        return replace(self, stages=functions, params=params, state=state, _source=source)

    def put_back(self, params: Params, model: nn.Module | None = None, state: Params | None = None) -> None:
        """Copy parameters, and a state, into a model.

        Args:
            params: ``{stage: tree}`` in the form of ``self.params``; of any stages. Where leaves are cut over
                data ranks, as under ``shard="params"``, all of these ranks call it: each gathers the whole.
            model: the model to write into, with the names of the one that was split; that one by default.
            state: ``{stage: tree}`` in the form of ``self.state``.

        Raises:
            ValueError: places of a tied parameter differ, stages with a state are given without it, a stage
                has other names, or a tensor of the model has no values.
        """
        values = self._joined(params, state)
        if not isinstance(model, nn.Module | None):
            raise TypeError(
                f"model: got {type(model).__name__}, expected a torch.nn.Module with the names of the one"
                " that was split"
            )
        tensors = Tensors.of(self.model if model is None else model)
        targets = {**tensors.params, **tensors.buffers}
        for name, value in values.items():
            if name not in targets or targets[name].shape != value.shape:
                got = list(targets[name].shape) if name in targets else "none"
                raise ValueError(
                    f"{name}: the model has {got}, expected one of shape {list(value.shape)}; give the model"
                    " that was split"
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

    def state_dict(self, params: Params, state: Params | None = None) -> dict[str, Tensor]:
        """Name parameters, and a state, as the model's ``load_state_dict`` does.

        Args:
            params, state: ``{stage: tree}``, of any stages.

        Returns:
            Tensors by name, not copied. Given all stages, it is a whole state dict: parameters that no stage
            reads, and buffers that are only read, come from the model.

        Raises:
            ValueError: places of a tied parameter differ; or stages with a state are given without it.
        """
        values, tensors = self._joined(params, state), Tensors.of(self.model)
        entries = {}
        for name, tensor in self.model.state_dict().items():
            first = tensors.places.get(name, name)
            if first in values:
                entries[name] = values[first]
            elif len(params) == len(self.stages):
                entries[name] = self._source.loaded.get(first, tensor)
        return entries

    def output_rows(self) -> int:
        """Return the size of the vocabulary of the last stage but the encoder, if that is the output layer.

        Raises:
            StageError: the stage does more than a linear layer and functions of each logit.
        """
        self._source.require_output_layer()
        return len(self.model.get_parameter(self._source.held[self._source.last].params[0]))

    def _joined(self, params: Params, state: Params | None) -> dict[str, Tensor]:
        """Collect all tensors by name, of trees in the form of the split."""
        self.require_form(params, state)
        for name, places in self.tied.items():
            values = [params[stage][key] for stage, key in places if stage in params]
            if any(values[0] is not other and not torch.equal(values[0], other) for other in values[1:]):
                raise ValueError(
                    f"{name} is tied, and its places in the stages {', '.join(str(s) for s, _ in places)}"
                    " differ; give each the sum"
                )
        trees = [tree for each in (params, state or {}) for tree in each.values()]
        return {name: t for tree in trees for name, t in tree.items()}

    def require_form(self, params: Params, state: Params | None) -> None:
        """Raise TypeError or ValueError unless trees have the stages and names of the split.

        The state of every stage of ``params`` that has one is required.
        """
        state = {} if state is None else state
        for kind, trees, expected in (("params", params, self.params), ("state", state, self.state)):
            if not isinstance(trees, Mapping) or not all(
                isinstance(tree, Mapping) for tree in trees.values()
            ):
                raise TypeError(
                    f"{kind}: got {type(trees).__name__}, expected {{stage: {{name: tensor}}}}, such as"
                    f" split.{kind}"
                )
            for stage, tree in trees.items():
                if stage not in range(len(self.stages)):
                    raise ValueError(
                        f"{kind}: got the stage {stage!r}, the split has {len(self.stages)} stages, from 0"
                    )
                if odd := tree.keys() ^ expected[stage].keys() if stage in expected else None:
                    name = min(odd, key=str)
                    what = "lacks" if name in expected[stage] else "does not know"
                    raise ValueError(
                        f"{kind}[{stage}] {what} {name!r}; give all names of split.{kind}[{stage}]"
                    )
        if missing := [stage for stage in params if stage in self.state and stage not in state]:
            raise ValueError(
                f"state: stage {missing[0]} is missing, whose buffers the model writes into; give"
                " split.state, or state.stage_state of what was trained"
            )


@naming_arguments
def materialize(
    split: Split,
    stages: Iterable[int] | None = None,
    seed: int = 0,
    *,
    init: Callable[[str, Tensor, torch.Generator], object] | None = None,
    device: torch.device | str = "cpu",
) -> dict[int, dict[str, Tensor]]:
    """Make the parameters of some stages of a model on ``meta``, module by module.

    Only these parameters, and the module at work, are ever allocated.

    Equivalent to, for each module of the model that has parameters of its own::

        torch.manual_seed(hash of (seed, name of the module))
        module.reset_parameters(); model._init_weights(module)    # those of the two that exist

    Numbers are drawn on the CPU. They depend on the seed and the name alone: not on the cuts, the device, or
    other parameters. A parameter that is a DTensor becomes this rank's slice of the
    whole. Parameters that are not on meta are returned as they are.

    Args:
        split: the split of a model.
        stages: the numbers of the stages, such as ``schedule.model_stages_of(rank)``; all by default.
        seed: the seed of all numbers, an int.
        init: a function ``init(name, tensor, generator)`` that fills a parameter in place, or leaves it to
            its module by not writing.
        device: the device of the parameters.

    Returns:
        ``{stage: {name: tensor}}``, in the form of ``split.params``.

    Raises:
        TypeError: the model was not split, or not numbers of stages.
        ValueError: nothing writes a parameter, or there is no such stage.

    >>> with torch.device("meta"):
    ...     model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    >>> from ppfunc import split
    >>> halves = split(model, torch.empty(4, 2, device="meta"), at=["1"])
    >>> torch.equal(materialize(halves)[1]["1.weight"], materialize(halves, [1])[1]["1.weight"])
    True
    """
    require_type("split", split, Split, "a split, as ppfunc.split(model, args, at=names) gives it")
    numbers = _numbers(stages, len(split.stages))
    wanted = {name: p for stage in numbers for name, p in split.params[stage].items()}
    done = {name: p for name, p in wanted.items() if not p.is_meta}
    for name in wanted:
        if name not in done:
            made = _drawn(split.model, name.rpartition(".")[0], seed, init)
            done |= {n: _laid_as(wanted[n], p.to(device)) for n, p in made.items() if n in wanted}
    return {stage: {name: done[name] for name in split.params[stage]} for stage in numbers}


def make_stage(source: "Source", stage: int) -> Callable[..., Any]:
    """Make the function of a stage: ``(params, x) -> y``, or ``(params, x, state) -> Output`` with a state.

    Between stages ``x`` is ``((forms, cast), values)``. ``forms`` tells each stage for which inputs to trace
    the model: the inputs themselves, with an empty tensor of shape ``(0, *shape)`` in the place of each
    tensor. The dtype of ``cast``, an empty tensor, is that to which all floating parameters are cast, or bool
    if they are not cast. ``values`` are those that the stage before sends.
    """
    model = source.model
    names, state_names = source.held[stage].params, source.held[stage].state
    into = [a for a, b in source.skips if b == stage]
    out_of = [b for a, b in source.skips if a == stage]
    encodes = stage == source.encoder
    first, last = stage == 0 or encodes, stage == source.last
    laid_out = ((name, layout_of(p)) for name, p in model.named_parameters() if name in names)
    layouts = {name: layout for name, layout in laid_out if layout is not None}

    def run(params: Mapping[str, Tensor], x: Any, *states: Any) -> Any:
        if not isinstance(params, Mapping) or set(params) != set(names):
            got = sorted(map(str, params)) if isinstance(params, Mapping) else type(params).__name__
            raise ValueError(
                f"params of stage {stage} of {type(model).__name__}: got {got}, expected {sorted(names)};"
                " take split.params, or a tree of its form"
            )
        before = None
        if source.cache and len(states) > bool(state_names):
            before, states = states[0], states[1:]
        carried, cache = _carry_of(before, stage)
        state = _state_of(states, state_names, stage)
        skips: dict[int, Any] = {}
        if into:  # by their order: where the head is in parts, the encoder has another number
            x, given = x
            skips = dict(zip(into, (given[source] for source in sorted(given)), strict=True))
        x = without_constants(x)
        (given, cast), values = ((x, None), ()) if first else x
        form, tensors = read_call(source.forms, given)
        forms = tuple(_empty(t) for t in tensors) if first else tensors
        device = next(t.device for t in (*params.values(), *forms))
        cast = forms[0].new_empty((0,), dtype=torch.bool) if cast is None else cast
        compute = source.compute_dtype(params, None if cast.dtype is torch.bool else cast.dtype, stage)
        leaves = [LeafForm(tuple(f.shape[1:]), f.dtype) for f in forms]
        code = source.codes(form, leaves, device, compute=compute, before=cache)[stage]
        inputs = tuple(t.contiguous() for t in tensors) if first else ()
        if source.encoder in code.part.received and skips[source.encoder] is None:
            raise StageError(
                f"stage {stage}",
                f"it reads what {source.tower} gives, in a microbatch without the encoder",
                "name all microbatches that have something to encode, ppfunc.spread(..., microbatches=...)",
            )
        received = tuple(t for a in code.part.received for t in (values if a == stage - 1 else skips[a]))
        if (dtypes := tuple(t.dtype for t in received)) != code.dtypes:
            raise StageError(
                f"stage {stage}",
                f"it gets values of the dtypes {[*dtypes]} from earlier stages, and with its parameters the"
                f" model makes {[*code.dtypes]}",
                "give the parameters of all stages the same dtype",
            )
        whole = {**params, **{n: as_dtensor(params[n], layout) for n, layout in layouts.items()}}
        weights = tuple(detached(n, whole[n]) if n in code.frozen else whole[n] for n in code.part.params)
        constants = tuple(source.buffer(n, device, stage) for n in code.part.constants)
        sent, new_state, kept, result = code.run(
            weights, constants, tuple(state[n] for n in code.part.state), inputs, carried, received
        )
        if last or encodes:
            y = result if last else ()
        else:
            relayed = tree_map(_empty, with_constants(given)) if stage == 0 else with_constants(given)
            y = ((relayed, cast.to(compute or torch.bool)), sent.get(stage + 1, ()))
        if not state_names and not out_of and not code.cache:
            return y
        return Output(
            y,
            state=(state | new_state) if state_names else None,
            skips={b: sent.get(b, ()) for b in out_of} if out_of else None,
            carry=Carry(kept, code.cache) if code.cache else None,
        )

    note_parameters(run, model, names)
    vars(run)[READS] = model
    vars(run)[WITHOUT_CARRY] = "" if source.cache else "a model that was split without slices="
    vars(run)["sizes_vary"] = False  # its code is that of one form of the inputs
    vars(run)["cut"] = source.cut
    vars(run)["known"] = source.known if source.known.names else None  # how a step reads its inputs
    run.__name__ = run.__qualname__ = f"stage_{stage}_of_{type(model).__name__}"
    mesh = next((layout.mesh for layout in layouts.values()), None)
    return declaring(run, Boundary(mesh, params=layouts))


def _empty(tensor: Tensor) -> Tensor:
    """Make a tensor without elements that tells the form of another."""
    return tensor.detach().new_empty((0, *tensor.shape))


def _carry_of(carry: Any, stage: int) -> tuple[tuple[Tensor, ...], CacheForm | None]:
    """Read the carry of a stage: the tensors that it holds, and the form of the whole cache."""
    if carry is None:
        return (), None
    if not isinstance(carry, Carry):
        raise TypeError(
            f"carry of stage {stage}: got {type(carry).__name__}, expected what an earlier step returned of"
            " this stage, or none"
        )
    form = carry.form
    expected = [leaf for leaf, home in zip(form.leaves, form.homes, strict=True) if home == stage]
    got = [LeafForm(tuple(t.shape), t.dtype) for t in carry.tensors]
    if got != expected:
        raise ValueError(
            f"carry of stage {stage}: got {got}, expected {expected}, as the microbatches of the step that"
            " returned it"
        )
    return carry.tensors, form


def _state_of(states: tuple[Any, ...], names: tuple[str, ...], stage: int) -> dict[str, Tensor]:
    """Read the state of a stage, its last argument."""
    if not names:
        if states:
            raise TypeError(
                f"stage {stage} of the model got {len(states)} arguments after x, expected none: it writes"
                " into no buffer, and all inputs of the model are those of stage 0"
            )
        return {}
    if len(states) != 1 or not isinstance(states[0], Mapping) or set(states[0]) != set(names):
        raise ValueError(
            f"stage {stage} writes into the buffers {', '.join(names)}, which are its state: give it to the"
            " step, state=split.state, and has_aux=True to get the next one"
        )
    return dict(states[0])


# -- weights: read from files, or drawn


def _read_weights(
    source: "Source",
    params: Params,
    state: Params,
    weights: str | PathLike[str] | Mapping[str, Tensor],
    stages: Iterable[int] | None,
    dtype: torch.dtype | None,
) -> tuple[dict[int, dict[str, Tensor]], dict[int, dict[str, Tensor]], dict[str, Tensor]]:
    """Read parameters and state by stage, each tensor once; by name, the buffers that are only read."""
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
    except FileNotFoundError:
        raise ValueError(
            f"weights: there is no file {path}; give a safetensors file, a folder of them, or a state dict"
        ) from None
    except SafetensorError as error:
        raise ValueError(
            f"weights: {path} is no safetensors file: {error}; give one, a folder of them, or a state dict"
        ) from None
