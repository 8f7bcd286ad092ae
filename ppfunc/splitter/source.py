"""Keep the code of the stages of a model, which is traced once for every form of its inputs."""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from hashlib import sha256
from itertools import pairwise
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from ppfunc.stage import StageError
from ppfunc.stage._torch import without_modes
from ppfunc.stage.device import autocast
from ppfunc.stage.modules.module import structure_watch
from ppfunc.stage.process import process_lock

from ._torch import vmapped
from .call import CallForm, Changes, LeafForm
from .cut import StagePart, WrittenElsewhereError, cut
from .functional import MAPPABLE, without_writes
from .program import StageCode, stage_codes
from .record import Region
from .trace import Trace, label_stages, trace

_MOST = 32  # forms of inputs whose code is kept
_PLAIN = {bool, int, float, str, NoneType}
_OF_EVERY_MODULE = {*vars(nn.Module())}


class Source:
    """Keeps the code of a model's stages, from the model, the form of its call and its cuts.

    Args:
        model: any module.
        form: how it is called.
        names: the modules that begin the stages after the first.

    Attributes:
        first: the code of the first trace, which all other code has to fit.
        loaded: buffers to be read in the place of the model's.
    """

    def __init__(self, model: nn.Module, form: CallForm, names: Sequence[str]) -> None:
        self.model, self.form, self.names = model, form, tuple(names)
        self.stages = len(names) + 1
        self.loaded: dict[str, Tensor] = {}
        self.first: tuple[StageCode, ...] = ()
        self._codes: OrderedDict[Hashable, tuple[StageCode, ...]] = OrderedDict()
        self._structure_same = structure_watch(model.modules())
        self._moved: dict[tuple[str, torch.device], tuple[Tensor, Tensor]] = {}

    def with_buffers(self, loaded: Mapping[str, Tensor]) -> "Source":
        """Return the source of the same code with other buffers."""
        other = copy(self)
        other.loaded = {**self.loaded, **loaded}
        return other

    @property
    def cut(self) -> str:
        """Name the model, where it is cut, and a digest of what its stages hold: the same on all ranks."""
        held = sha256(repr([(code.params, code.state) for code in self.first]).encode()).hexdigest()[:16]
        return f"{type(self.model).__name__} cut at {', '.join(self.names) or 'no module'} ({held})"

    @property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """List the pairs of stages between which values travel that are not neighbours."""
        pairs = ((a, b) for b, code in enumerate(self.first) for a in code.received)
        return tuple(sorted((a, b) for a, b in pairs if a < b - 1))

    def codes(
        self,
        inputs: Sequence[LeafForm],
        device: torch.device,
        traced: Trace | None = None,
        changes: Changes = (),
        compute: torch.dtype | None = None,
    ) -> tuple[StageCode, ...]:
        """Return the code of every stage for inputs of these forms.

        Args:
            inputs: the forms.
            device: where the stages compute.
            compute: the dtype of all floating parameters, by default that of each in the model.
            traced: the trace of the model for them, by default made here.
            changes: of the constants of the call.

        Raises:
            StageError: the model cannot be traced, or the stages would not be those of the split.
        """
        functional = vmapped()  # where no operator may write into a tensor
        key = (
            *inputs,
            device,
            compute,
            functional,
            repr(changes),
            _plain_attributes(self.model),
            tuple((p.requires_grad, p.dtype) for p in self.model.parameters()),
            tuple((b.shape, b.dtype) for b in self.model.buffers()),
            autocast(),
            torch.get_default_dtype(),
        )
        with process_lock:
            if not self._structure_same():
                self._codes.clear()
                self._structure_same = structure_watch(self.model.modules())
            if key not in self._codes:
                if traced is None:
                    form = self.form.with_changes(changes)
                    traced = trace(self.model, form, inputs, device, self.names, compute)
                self._codes[key] = self._make_codes(traced, device, functional)
                while len(self._codes) > _MOST:
                    self._codes.popitem(last=False)
            self._codes.move_to_end(key)
            return self._codes[key]

    def compute_dtype(
        self, params: Mapping[str, Tensor], before: torch.dtype | None, stage: int
    ) -> torch.dtype | None:
        """Return the dtype of all floating parameters in a step, None where each has that of the model.

        Args:
            params: those of a stage.
            before: as the stage before has returned.

        Raises:
            StageError: only some have another dtype than in the model.
        """
        dtypes = {name: self.model.get_parameter(name).dtype for name in params}
        floating = {name: params[name].dtype for name, dtype in dtypes.items() if dtype.is_floating_point}
        differ = any(got != dtypes[name] for name, got in floating.items())
        cast = next(iter(floating.values())) if differ else before
        for name, got in floating.items():
            if cast is not None and (got != cast or before not in (None, cast)):
                raise StageError(
                    f"stage {stage}",
                    f"its parameter {name} has the dtype {got}, and others have been cast to"
                    f" {before or cast}",
                    "cast all floating parameters to one dtype, or none of them",
                )
        return cast

    def buffer(self, name: str, device: torch.device, stage: int) -> Tensor:
        """Return the values of a read-only buffer on a device.

        Raises:
            StageError: the buffer is on the device meta.
        """
        buffer = self.loaded[name] if name in self.loaded else self.model.get_buffer(name)
        if buffer.device == device:
            return buffer.detach()
        if buffer.is_meta:
            raise StageError(
                f"stage {stage}",
                f"the buffer {name} of the model is on the device meta, it has no values",
                "load them by split.load, or assign the values to the buffer of the model",
            )
        with process_lock, without_modes():
            before, moved = self._moved.get((name, device), (None, None))
            if moved is None or before is not buffer:
                moved = buffer.detach().to(device)
                self._moved[name, device] = buffer, moved
            return moved

    def _make_codes(self, traced: Trace, device: torch.device, functional: bool) -> tuple[StageCode, ...]:
        ambient = Region(True, autocast())
        label_stages(traced, _begins(self.names, traced))
        traced = without_writes(traced, device) if functional else traced
        state = {name: stage for stage, code in enumerate(self.first) for name in code.state}
        try:
            parts = cut(traced, self.stages, state)
        except WrittenElsewhereError:
            traced = without_writes(traced, device)
            parts = cut(traced, self.stages, state)
        _require_plain(parts)
        _require_same(self.first, parts)
        codes = stage_codes(traced, parts, ambient, MAPPABLE if functional else {})
        self.first = self.first or codes
        return codes


def _plain_attributes(model: nn.Module) -> tuple[Any, ...]:
    """List numbers and texts among the attributes of modules, and of configurations that they hold."""
    plain: list[Any] = []
    seen: set[int] = set()
    for module in model.modules():
        for name, value in vars(module).items():
            if type(value) in _PLAIN:
                plain.append(value)
            elif (
                name not in _OF_EVERY_MODULE
                and id(value) not in seen
                and hasattr(value, "__dict__")
                and not callable(value)
            ):
                seen.add(id(value))
                plain += [inner for inner in vars(value).values() if type(inner) in _PLAIN]
    return tuple(plain)


def _require_plain(parts: Sequence[StagePart]) -> None:
    """Raise where a stage would take a DTensor from another."""
    for stage, part in enumerate(parts):
        for source, nodes in part.received.items():
            for node in nodes:
                if node.meta["laid"]:
                    raise StageError(
                        f"stage {stage}",
                        f"it takes the value {_described(node)}, a DTensor, from stage {source}",
                        "cut where activations are plain tensors, as use_local_output=True makes them",
                    )


def _begins(names: Sequence[str], traced: Trace) -> list[int]:
    """Find the operators with which stages begin.

    Raises:
        ValueError: a named module is not called, or not in this order, or a stage would have no operator.
    """
    if missing := [name for name in names if name not in traced.starts]:
        raise ValueError(
            f"at: the module {missing[0]} is not called; name one that is, or the modules within it"
        )
    begins = [traced.starts[name] for name in names]
    if begins != sorted(begins):
        real = sorted(names, key=traced.starts.__getitem__)
        raise ValueError(f"at: got {list(names)}, expected the order in which they are called, {real}")
    for (before, start), (name, end) in pairwise([("", 0), *zip(names, begins, strict=True)]):
        if start == end:
            where = f"at the same operator as {before}" if before else "at the first operator of the model"
            raise ValueError(
                f"at: the module {name} begins {where}, which leaves a stage without any; leave one out"
            )
    if begins and begins[-1] == sum(node.op == "call_function" for node in traced.nodes):
        raise ValueError(f"at: the module {names[-1]} calls no operator, nor does any after it; leave it out")
    return begins


def _require_same(first: Sequence[StageCode], parts: Sequence[StagePart]) -> None:
    """Raise where stages take other parameters, state or values than those of the split."""
    when = "for the inputs, the mode or the modules that it has now, and did not at the split"
    mend = "split with inputs of this form, in this mode (training or evaluation)"
    for stage, (code, part) in enumerate(zip(first, parts, strict=False)):  # the first has none before it
        if other := [name for name in part.params if name not in code.params]:
            raise StageError(f"stage {stage}", f"it reads the parameter {other[0]} {when}", mend)
        if other := [name for name in part.state if name not in code.state]:
            raise StageError(f"stage {stage}", f"it writes into the buffer {other[0]} {when}", mend)
        for source, (node, *_) in part.received.items():
            if source < stage - 1 and source not in code.received:
                raise StageError(
                    f"stage {stage}",
                    f"it takes the value {_described(node)}, from stage {source} {when}",
                    mend,
                )


def _described(node: Node) -> str:
    """Name a value, its shape, and the line that makes it."""
    shape = list(node.meta["value"].shape)
    return f"{node.name.removeprefix('v_')} of shape {shape}{node.meta.get('place', '')}"
