"""Make the stage functions of a split: pure functions on what crosses the boundaries."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ppfunc.stage import StageError
from ppfunc.stage.carried import Constant, Output, without_constants
from ppfunc.stage.layout import Boundary, as_dtensor, declaring, layout_of
from ppfunc.stage.modules.frozen import detached, note_parameters

from ._torch import vmapped
from .call import Changes
from .record import MODEL
from .source import Source
from .trace import LeafForm


def make_stage(source: Source, stage: int) -> Callable[..., Any]:
    """Make the function of a stage: ``(params, x) -> y``, or ``(params, x, state) -> Output`` with a state.

    Between stages ``x`` is ``(forms, values)``, or ``(forms, values, changes)``. ``forms`` tells each stage
    for which inputs to trace the model: an empty tensor of shape ``(0, *shape)`` per input, and one more,
    whose dtype is that to which all floating parameters are cast, or bool if they are not cast. ``values``
    are those that the stage before sends. ``changes`` are the numbers, texts and flags that differ from those
    at the split.
    """
    # The function itself refers to the model: a step follows the modes of modules that it finds there.
    model = source.model
    names, state_names = source.first[stage].params, source.first[stage].state
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
        inputs, forms, values, changes = _read(source, stage, without_constants(x))
        device = next(t.device for t in (*params.values(), *inputs, *forms))
        *of_inputs, cast = forms
        compute = source.compute_dtype(params, None if cast.dtype is torch.bool else cast.dtype, stage)
        forms = (*of_inputs, cast.to(compute or torch.bool))
        leaves = [LeafForm(tuple(f.shape[1:]), f.dtype) for f in of_inputs]
        code = source.codes(leaves, device, functional=vmapped(), compute=compute, changes=changes)[stage]
        received = tuple(t for a in code.received for t in (values if a == stage - 1 else skips[a]))
        _require_dtypes(received, code.dtypes, stage)
        whole = {**params, **{n: as_dtensor(params[n], layout) for n, layout in layouts.items()}}
        weights = tuple(detached(n, whole[n]) if n in code.frozen else whole[n] for n in code.params)
        constants = tuple(source.buffer(n, device, stage) for n in code.constants)
        sent, new_state, result = code.run(
            weights, constants, tuple(state[n] for n in code.state), inputs, received
        )
        relayed = (Constant(changes),) if changes else ()
        y = result if last else (forms, sent.get(stage + 1, ()), *relayed)
        if not state_names and not out_of:
            return y
        return Output(
            y,
            state=(state | new_state) if state_names else None,
            skips={b: sent.get(b, ()) for b in out_of} if out_of else None,
        )

    note_parameters(run, model, names)
    vars(run)["sizes_vary"] = False  # its code is that of one form of the inputs
    vars(run)["cut"] = source.cut
    run.__name__ = run.__qualname__ = f"stage_{stage}_of_{type(model).__name__}"
    mesh = next((layout.mesh for layout in layouts.values()), None)
    return declaring(run, Boundary(mesh, params=layouts))


def _read(
    source: Source, stage: int, x: Any
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...], Changes]:
    """Take apart the input of a stage: inputs of the model (first stage), their forms, values from the stage
    before, and changes of constants.
    """
    if stage == 0:
        tensors, changes = source.form.read(x)
        inputs = tuple(t.contiguous() for t in tensors)
        forms = [t.detach().new_empty((0, *t.shape)) for t in inputs]
        return inputs, (*forms, forms[0].new_empty((0,), dtype=torch.bool)), (), changes
    forms, values, *relayed = x
    return (), tuple(forms), tuple(values), relayed[0] if relayed else ()


def _require_dtypes(received: Sequence[Tensor], expected: Sequence[torch.dtype], stage: int) -> None:
    if (got := [t.dtype for t in received]) != [*expected]:
        reason = (
            f"it gets values of the dtypes {got} from earlier stages, and with its parameters the model"
            f" makes {[*expected]}"
        )
        raise StageError(f"stage {stage}", reason, "give the parameters of all stages the same dtype")


def _state_of(states: tuple[Any, ...], names: tuple[str, ...], stage: int) -> dict[str, Tensor]:
    """Read the state of a stage, its last argument."""
    if not names:
        if states:
            raise TypeError(
                f"stage {stage} of {MODEL} got {len(states)} arguments after x, expected none: it writes into"
                " no buffer, and all inputs of the model are those of stage 0"
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
