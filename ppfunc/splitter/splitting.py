"""Split any model into stages: choose the modules at which to cut, trace one call, cut the trace."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from ppfunc._checks import naming_arguments, require_type, shown
from ppfunc.parallel.partition import Partition, partition_balanced
from ppfunc.schedule.collector import collector_paused
from ppfunc.stage._torch import storage
from ppfunc.stage.modules import is_subclass, require_usable

from .cache import cache_name, require_same_values
from .call import CallForm, Constants, LeafForm, Tensors
from .cut import Source, is_within
from .trace import PIPE_SPLIT, Trace, trace
from .value import Split, make_stage

_NEAR = 1.2  # a heaviest stage of so much more than the least is near enough, if cutting deeper is not needed


@collector_paused()
@naming_arguments
def split(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    at: Sequence[str] | int | Partition | None = None,
    constants: Sequence[str] = (),
    state: Sequence[str] = (),
    slices: int | Sequence[int] | None = None,
    output: str | None = None,
    encoder: str | None = None,
) -> Split:
    """Split a model into stages: trace one call of it, and cut the operators where the named modules begin.

    The inputs of a step have the form of ``args``: one tensor, a tuple of positional arguments, or a
    dictionary of keyword arguments (given as ``args`` or as ``kwargs``); where both are given, a tuple of the
    positional ones and, last, the dictionary. Values other than tensors become part of the split: the inputs
    of a step leave such keyword arguments out, and have None in place of positional ones; or they give
    numbers, texts and flags anew, keyword arguments in a dictionary that follows the positional ones. The
    model is traced once for each such value. The loss function gets the output of the model, in its own
    class: ``loss_fn(output, target)``. For a model that takes labels and returns its loss, pass the labels as
    inputs, no targets, and ``loss_fn=lambda output, _: output.loss``.

    Microbatches of one step may differ: some leave a keyword argument out, or have None in its place. Where
    the model then reads other parameters, give one example of each form. A stage has the parameters that it
    reads in any of them::

        split(model, ppfunc.Microbatches([{"ids": ids, "pixels": pixels}, {"ids": ids}]), at=4)

    Other batch sizes and lengths work: the model is traced again for every form of the inputs, the mode
    (training or evaluation) that it is in, and autocast. Values that later stages need travel by skip
    connections. Values that depend on integer inputs alone (masks, tables of positions) are computed again in
    each stage that needs them. Random operators, ``no_grad`` and ``autocast`` regions, and functions with a
    backward of their own are kept. Numbers that the model reads from its attributes, and from objects among
    these, are as they are when a step begins. Functions that the model has compiled are called as Python, and
    flex attention is computed by its scores as a matrix, on the CPU too. Control flow and shapes may depend
    on tensors that the model makes of numbers in its code, such as a mask of ones. Stages leave out checks of
    values (``torch._check``, the arguments of ``torch.distributions``). Parameters may be DTensors, as
    ``parallelize_module`` makes them, if activations are plain tensors at the cuts. Frozen parameters of
    other subclasses (quantised weights) are constants of the stages, read when the model is traced.

    Args:
        model: any module, also on ``meta``, which is left unmodified.
        args, kwargs: the arguments of one call on one microbatch, tensors may be on ``meta``; or Microbatches
            of such ``args``, one for each form. Of these, the largest decides where a number of stages is
            cut, and values other than tensors are part of the split where all have the same.
        at: names of modules, each of which begins a stage at its first operator; or the number of stages,
            which are then balanced by the operations of their layers; or a partition of the layers of the
            model. None for a model that calls ``torch.distributed.pipelining.pipe_split()``: each call begins
            a stage.
        constants: names of arguments, tensors of integers or flags by which the model makes shapes or decides
            (``image_grid_thw``, ``cu_seqlens``). Their values belong to the form of the inputs: the model is
            traced for each. A step reads them, best on the CPU. In a whole batch they are cut as other inputs
            are, to the same values in each microbatch.
        state: patterns of ``fnmatch`` for names of buffers that the model only reads, and that are state all
            the same, for ``update_state`` of a trainer: ``["*.e_score_correction_bias"]``.
        slices: number of equal slices of the tokens, or their lengths, for a schedule of slices such as
            ``seq1f1b``; the example has whole sequences. The model is called on each slice with the cache
            that it returned of the slice before, its argument ``past_key_values`` or ``cache_params``, as
            models of transformers have it; each stage carries the tensors of the cache that it makes. Tokens
            are the only input: shift targets before they are cut, since a loss that shifts inside loses a
            token at the end of each slice. Steps may have other slices. The model is called on the first row
            of the example, in one piece and slice by slice, and refused where values differ, as they do
            where a cache keeps another window than the mask has; tensors on ``meta`` have none, and a model
            with DTensors is not called: test a small model of its class. Gradients are not compared, but
            followed through every tensor of the cache. By default the model is not sliced.
        output: name of the output layer (``"lm_head"``), which begins a further stage, the last, which ``at``
            does not count, for :func:`ppfunc.vocabulary_parallel`. Of the results of the model, those that
            other stages compute are left out. By default the layer is within the stages.
        encoder: name of a module that encodes a part of the inputs, such as the vision tower of a language
            model (``"model.visual"``, ``"model.vision_tower"``: see ``model.named_children()``). It is a
            further stage, the last, which ``at`` does not count: what the module computes, and all that this
            depends on. It takes the inputs as the first stage does. The schedule is of
            :func:`ppfunc.spread`, with copies of the encoder on all ranks; microbatches that leave its inputs
            out need no copy. By default the module is within the stages.

    Returns:
        The split, in the mode that the model is in.

    Raises:
        StageError: the model cannot be traced, or cut there: control flow or shapes that depend on values, a
            buffer that several stages write into, hooks on gradients, draws by Python or numpy; a cache that
            the model does not return, does not read, or reads or keeps without gradients. The message names
            the line.
        TypeError: a module is scripted or compiled, a trained parameter is of a subclass that is no DTensor,
            a model to be sliced takes no cache.
        ValueError: a name is not that of a module, an argument or a buffer, modules are not called in this
            order, two parameters share memory, or a model to be sliced gets more than tokens.

    >>> model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    >>> parts = split(model, torch.zeros(8, 2), at=["2"])
    >>> [sorted(parts.params[stage]) for stage in range(2)]
    [['0.bias', '0.weight'], ['2.bias', '2.weight']]

    A vision tower on all ranks, each with its share of the microbatches::

        schedule = pp.spread(pp.one_f_one_b(ranks, microbatches), microbatches=with_images)
        parts = pp.split(model, example, at=ranks, encoder="model.vision_tower")
        loss, grads = pp.value_and_grad(parts, loss_fn, schedule)(parts.params, inputs, targets)
    """
    _require_module(model)
    tower, head = (checked_module(model, *given) for given in (("encoder", encoder), ("output", output)))
    if tower and slices is not None:
        raise ValueError("encoder: got a name and slices, whose only inputs are tokens; leave one out")
    # The class of microbatches is not imported for this.
    examples = [*args] if type(args).__name__ == "Microbatches" else [args]
    known = Constants.of(constants, model)
    require_type("state", state, list | tuple, "a list of patterns of names of buffers")
    calls = [CallForm.of(known.read(example), known.read(kwargs)) for example in examples]
    forms = [form for form, _ in calls]
    if len({form.positional for form in forms}) != 1:
        raise ValueError(
            f"args: got the examples {' and '.join(form.described() for form in forms)}; give dictionaries of"
            " keyword arguments, or tuples of as many positional ones, with None for what an example has not"
        )
    cache = ""
    if slices is not None:
        cache = cache_name(model, forms)
        if len(calls) > 1:
            raise TypeError("args: got Microbatches, expected one example with slices")
        calls = [(forms[0], (part,)) for part in _cut(calls[0][1][0], slices)]
        forms = forms * len(calls)
    tensors = [t for _, of_call in calls for t in of_call]
    inputs = [tuple(LeafForm(tuple(t.shape), t.dtype) for t in of_call) for _, of_call in calls]
    device = next((t.device for t in (*model.parameters(), *tensors) if not t.is_meta), torch.device("cpu"))
    names = _checked_names(model, at) if isinstance(at, Sequence) else []
    traces: list[Trace] = []
    for form, leaves in zip(forms, inputs, strict=True):
        before = traces[-1].cache if cache and traces else None
        traces.append(trace(model, form, leaves, device, cache=cache, before=before))
    if not isinstance(at, Sequence):
        names = _choose(model, max(traces, key=lambda traced: len(traced.nodes)), at, (tower, head))
    names += [head] if head else []
    source = Source(
        model, names, known, [*zip(forms, inputs, traces, strict=True)], device, state, cache, tower, head
    )
    if cache:
        require_same_values(model, forms[0], tensors, cache, device)
    model_tensors = Tensors.of(model)
    values = {name: t.detach() for name, t in (*model_tensors.params.items(), *model_tensors.buffers.items())}
    places = {
        name: tuple((stage, name) for stage, held in enumerate(source.held) if name in held.params)
        for name in model_tensors.params
    }
    params = {stage: {name: values[name] for name in held.params} for stage, held in enumerate(source.held)}
    states = {
        stage: {name: values[name] for name in held.state}
        for stage, held in enumerate(source.held)
        if held.state
    }
    tied = {name: at_stages for name, at_stages in places.items() if len(at_stages) > 1}
    return Split(
        tuple(make_stage(source, stage) for stage in range(source.stages)),
        params,
        states,
        tied,
        source.skips,
        tuple(name for name, at_stages in places.items() if not at_stages),
        tuple(names),
        source,
    )


def _cut(tokens: torch.Tensor, slices: int | Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Cut the tokens of an example, as :func:`ppfunc.microbatch` does."""
    if tokens.ndim < 2:
        raise ValueError(f"args: got the shape {tuple(tokens.shape)}, which has no axis 1 of tokens to cut")
    length = tokens.shape[1]
    lengths = [length // max(slices, 1)] * slices if isinstance(slices, int) else slices
    if not isinstance(lengths, list | tuple) or sum(lengths) != length or min(lengths, default=0) < 1:
        raise ValueError(
            f"slices: got {slices!r} and {length} tokens, expected a divisor of them, or lengths that make"
            " them up"
        )
    return tokens.split([*lengths], 1)


def _require_module(model: Any) -> None:
    require_usable(model)
    if hasattr(model, "split_gm"):
        raise TypeError(
            f"model: got a {type(model).__name__} of torch.distributed.pipelining, cut already; split the"
            " model that it was made of, ppfunc.split(model, args, at=names)"
        )
    for name, part in model.named_modules():
        what = f"{name or 'model'}: got {type(part).__name__}"
        if isinstance(part, torch.jit.ScriptModule):
            raise TypeError(f"{what}, which cannot be traced; give the module from before it was scripted")
        if hasattr(part, "_orig_mod") or part._compiled_call_impl is not None:
            raise TypeError(
                f"{what}, which is compiled; give the module from before that, and compile stages:"
                " engine=graph(compile=True)"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_subclass(tensor) and tensor.requires_grad:
            raise TypeError(
                f"{name}: got a {type(tensor).__name__} that is trained, expected a plain tensor or a"
                " DTensor; freeze it, requires_grad_(False), or split the model before it is quantised"
            )
    if (pair := _overlapping(dict(model.named_parameters()))) is not None:
        one, other = pair
        raise ValueError(
            f"{one} and {other} are two parameters that share memory; tie them as one, {other} = {one}, or"
            " clone one of them"
        )


def _overlapping(tensors: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
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


def _checked_names(model: nn.Module, at: Sequence[str]) -> list[str]:
    if isinstance(at, str):
        raise TypeError(
            f"at: got {at!r}, expected a list of names of modules, [{at!r}] if it is one, or a number of"
            " stages, which are then balanced"
        )
    known = dict(model.named_modules(remove_duplicate=False))
    for name in at:
        if not isinstance(name, str):
            names = [n for n, module in known.items() if module is name] or [str(name)]
            raise TypeError(f"at: got {shown(name)}, expected the name of a module, such as {names[0]!r}")
        _require_known("at", name, known)
    if len({id(known[name]) for name in at}) < len(at):
        raise ValueError(f"at: got {list(at)}, expected each module once")
    return list(at)


def checked_module(model: nn.Module, argument: str, name: str | None) -> str:
    """Return the name of a module that an argument gives, or "" where no name is given.

    Raises:
        TypeError: the name is no text.
        ValueError: the model has no module of this name.
    """
    if name is None:
        return ""
    require_type(argument, name, str, "the name of a module")
    _require_known(argument, name, dict(model.named_modules(remove_duplicate=False)))
    return name


def _require_known(argument: str, name: str, known: Iterable[str]) -> None:
    if not name or name not in known:
        raise ValueError(f"{argument}: got {name!r}, which is no module of the model; {_near(name, known)}")


def _near(name: str, known: Iterable[str]) -> str:
    """Suggest names: those that end in the unknown one, similar ones, or those of the outermost modules."""
    names = [*filter(None, known)]
    if near := [n for n in names if n.endswith(f".{name}")] or get_close_matches(name, names, n=3):
        return f"the nearest are {', '.join(near[:3])}"
    outermost = sorted(names, key=lambda n: n.count("."))[:8]
    return f"its outermost modules are {', '.join(outermost) or 'none'}"


def _choose(model: nn.Module, traced: Trace, at: int | Partition | None, others: Iterable[str]) -> list[str]:
    """Choose the modules that begin the stages after the first.

    The layers of a model are the elements of its ``ModuleList`` and ``Sequential`` containers, those of the
    outermost ones first. Elements of inner containers are cut apart where the outer ones are too few, or too
    unequal; where there are no containers, any module is.

    Args:
        traced: a trace of the model.
        at: the number of stages, a partition of the layers, or None for the calls of ``pipe_split()``.
        others: the modules with stages of their own, which are left out; empty names of missing ones.

    Raises:
        ValueError: there are not so many layers.
        TypeError: the model has no cuts of its own, and none are asked for.
    """

    def inside(name: str) -> bool:
        return any(other and is_within(name, other) for other in others)

    levels = [[name for name in names if not inside(name)] for names in _levels(model)]
    if at is None:
        if not (names := [name for name in traced.starts if name.startswith(PIPE_SPLIT)]):
            raise TypeError(
                "at is missing, expected names of modules, a number of stages, or a Partition; or a model"
                " that calls torch.distributed.pipelining.pipe_split()"
            )
        return names
    called = [_in_order(names, traced.starts) for names in levels]
    if isinstance(at, Partition):
        return _of_partition(called, at)
    if isinstance(at, bool) or not isinstance(at, int) or at < 1:
        raise ValueError(
            f"at: got {at!r}, expected names of modules, such as {[*at] if isinstance(at, dict) else ['0']},"
            " a number of stages from 1, or a Partition"
        )
    operators = [node.meta for node in traced.nodes if node.op == "call_function"]
    flops = [0.0 if meta["module"] and inside(meta["module"].name) else meta["flops"] for meta in operators]
    return _balanced(called, traced.starts, [*accumulate(flops, initial=0.0)], at)


def _levels(model: nn.Module) -> list[list[str]]:
    """List the names of modules by how many containers they are in; last, of all modules."""
    kinds = dict(model.named_modules())
    depths: dict[int, list[str]] = {}
    for name in filter(None, kinds):
        parents = [name[:i] for i, c in enumerate(name) if c == "."] + [""]
        inside = [p for p in parents if isinstance(kinds.get(p), nn.ModuleList | nn.Sequential)]
        if isinstance(kinds.get(name.rpartition(".")[0]), nn.ModuleList | nn.Sequential):
            depths.setdefault(len(inside), []).append(name)
    levels = accumulate(depths[depth] for depth in sorted(depths))
    return [*levels, [name for name in kinds if name]]


def _in_order(names: Sequence[str], starts: Mapping[str, int]) -> list[str]:
    """Sort modules by their first operators. Of several with the same one, keep the first."""
    first: dict[int, str] = {}
    for name in names:
        if name in starts:
            first.setdefault(starts[name], name)
    return [first[at] for at in sorted(first)]


def _of_partition(called: Sequence[Sequence[str]], partition: Partition) -> list[str]:
    for names in called:
        if len(names) == partition.layers:
            return [names[start] for start in partition.boundaries[1:-1]]
    counts = ", ".join(f"{len(names)} ({names[0]} to {names[-1]})" for names in called[:-1] if names)
    raise ValueError(
        f"at: got a partition of {partition.layers} layers; the model has"
        f" {counts or 'no ModuleList or Sequential of layers'}; make a partition of so many, or give names"
    )


def _balanced(
    called: Sequence[Sequence[str]], starts: Mapping[str, int], marks: Sequence[float], stages: int
) -> list[str]:
    """Balance the stages at the outermost level whose heaviest stage is near the least of all levels."""
    cuts = [[name for name in names if 0 < starts[name] < len(marks) - 1] for names in called]
    levels = [names for names in cuts[:-1] if len(names) >= stages - 1] or [
        names for names in cuts[-1:] if len(names) >= stages - 1
    ]
    choices: list[tuple[float, list[str]]] = []
    for names in levels:
        weights = [
            marks[b] - marks[a] for a, b in pairwise([0, *(starts[name] for name in names), len(marks) - 1])
        ]
        partition = partition_balanced(weights, stages)
        choices.append((max(partition.loads(weights)), [names[b - 1] for b in partition.boundaries[1:-1]]))
    if not choices:
        raise ValueError(
            f"at: got {stages} stages, the model calls {len(called[-1])} modules one after the other; take"
            " fewer stages"
        )
    least = min(heaviest for heaviest, _ in choices)
    return next(names for heaviest, names in choices if heaviest <= _NEAR * least)
