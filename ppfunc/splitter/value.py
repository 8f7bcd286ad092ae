"""Hold a model cut into stages: the value `Split`, and its stage functions, pure ones on what crosses the
boundaries.

Steps ask whether stages are a `Split`. The modules that trace are imported when a model is split, or loaded.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from ppfunc._checks import not_copied, require_type
from ppfunc.stage.abstract.captures import READS
from ppfunc.stage.constants import with_constants, without_constants
from ppfunc.stage.errors import StageError
from ppfunc.stage.frozen import detached, note_parameters
from ppfunc.stage.layout import Boundary, as_dtensor, declaring, layout_of
from ppfunc.stage.program import Output
from ppfunc.stage.tree import tree_map

from .call import LeafForm, read_call

if TYPE_CHECKING:
    from .cut import Source

Params = Mapping[int, Mapping[str, Tensor]]


@dataclass(frozen=True, eq=False)
class Split:
    """A model cut into stages.

    Args:
        stages: the pure function of each stage, ``fn(params, x) -> y``; ``fn(params, x, state) -> Output``
            for a stage with a state. The last returns the output of the model, in the model's own class.
            Parts of it that are neither tensors nor plain values, such as a cache, raise when they are used.
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
        tied = f", tied {', '.join(self.tied)}" if self.tied else ""
        return (
            f"<split of {type(self.model).__name__} into {len(self.stages)} stages{cuts}; parameters"
            f" {sizes}{tied}>"
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
        from .weights import read_weights

        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dtype: got {dtype!r}, expected a floating dtype such as torch.float32")
        params, state, buffers = read_weights(self._source, self.params, self.state, weights, stages, dtype)
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
        from .weights import join, put_back

        self.require_form(params, state)
        if not isinstance(model, nn.Module | None):
            raise TypeError(
                f"model: got {type(model).__name__}, expected a torch.nn.Module with the names of the one"
                " that was split"
            )
        put_back(self._source.model if model is None else model, join(params, state, self.tied))

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
        from .weights import join, state_dict

        self.require_form(params, state)
        return state_dict(
            self._source, join(params, state, self.tied), whole=set(params) == set(range(len(self.stages)))
        )

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
    from .weights import draw_weights

    require_type("split", split, Split, "a split, as ppfunc.split(model, args, at=names) gives it")
    return draw_weights(split._source, split.params, stages, seed, init, device)


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
    last = stage == source.stages - 1
    laid_out = ((name, layout_of(p)) for name, p in model.named_parameters() if name in names)
    layouts = {name: layout for name, layout in laid_out if layout is not None}

    def run(params: Mapping[str, Tensor], x: Any, *states: Any) -> Any:
        _require_names(params, names, f"params of stage {stage} of {type(model).__name__}")
        state = _state_of(states, state_names, stage)
        skips: dict[int, Any] = {}
        if into:
            x, skips = x
        x = without_constants(x)
        (given, cast), values = ((x, None), ()) if stage == 0 else x
        form, tensors = read_call(source.forms, given)
        forms = tuple(_empty(t) for t in tensors) if stage == 0 else tensors
        device = next(t.device for t in (*params.values(), *forms))
        cast = forms[0].new_empty((0,), dtype=torch.bool) if cast is None else cast
        compute = source.compute_dtype(params, None if cast.dtype is torch.bool else cast.dtype, stage)
        leaves = [LeafForm(tuple(f.shape[1:]), f.dtype) for f in forms]
        code = source.codes(form, leaves, device, compute=compute)[stage]
        inputs = tuple(t.contiguous() for t in tensors) if stage == 0 else ()
        received = tuple(t for a in code.part.received for t in (values if a == stage - 1 else skips[a]))
        _require_dtypes(received, code.dtypes, stage)
        whole = {**params, **{n: as_dtensor(params[n], layout) for n, layout in layouts.items()}}
        weights = tuple(detached(n, whole[n]) if n in code.frozen else whole[n] for n in code.part.params)
        constants = tuple(source.buffer(n, device, stage) for n in code.part.constants)
        sent, new_state, result = code.run(
            weights, constants, tuple(state[n] for n in code.part.state), inputs, received
        )
        if last:
            y = result
        else:
            relayed = tree_map(_empty, with_constants(given)) if stage == 0 else with_constants(given)
            y = ((relayed, cast.to(compute or torch.bool)), sent.get(stage + 1, ()))
        if not state_names and not out_of:
            return y
        return Output(
            y,
            state=(state | new_state) if state_names else None,
            skips={b: sent.get(b, ()) for b in out_of} if out_of else None,
        )

    note_parameters(run, model, names)
    vars(run)[READS] = model
    vars(run)["sizes_vary"] = False  # its code is that of one form of the inputs
    vars(run)["cut"] = source.cut
    vars(run)["known"] = source.known if source.known.names else None  # how a step reads its inputs
    run.__name__ = run.__qualname__ = f"stage_{stage}_of_{type(model).__name__}"
    mesh = next((layout.mesh for layout in layouts.values()), None)
    return declaring(run, Boundary(mesh, params=layouts))


def _empty(tensor: Tensor) -> Tensor:
    """Make a tensor without elements that tells the form of another."""
    return tensor.detach().new_empty((0, *tensor.shape))


def _require_dtypes(received: Sequence[Tensor], expected: Sequence[torch.dtype], stage: int) -> None:
    if (got := [t.dtype for t in received]) != [*expected]:
        raise StageError(
            f"stage {stage}",
            f"it gets values of the dtypes {got} from earlier stages, and with its parameters the model"
            f" makes {[*expected]}",
            "give the parameters of all stages the same dtype",
        )


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


def _require_names(params: Any, names: Sequence[str], what: str) -> None:
    if not isinstance(params, Mapping) or set(params) != set(names):
        got = sorted(map(str, params)) if isinstance(params, Mapping) else type(params).__name__
        raise ValueError(
            f"{what}: got {got}, expected {sorted(names)}; take split.params, or a tree of its form"
        )
