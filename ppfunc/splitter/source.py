"""Keep the code of the stages of a model, which is traced once for every form of its inputs."""

import fnmatch
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from hashlib import sha256
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.fx import Node

from ppfunc.stage import StageError
from ppfunc.stage._torch import vmapped, without_modes
from ppfunc.stage.abstract.captures import Watch, ambient
from ppfunc.stage.device import autocast
from ppfunc.stage.process import process_lock

from .call import CallForm, Constants, LeafForm
from .cut import StageCode, StagePart, cut, readers, stage_codes, state_buffers
from .record import Region
from .trace import Trace, trace

_MOST = 32  # forms of inputs whose code is kept


class Source:
    """Keeps the code of a model's stages, from the model, the form of its call and its cuts.

    Args:
        model: any module.
        forms: the forms of the calls at the split.
        names: the modules that begin the stages after the first.
        known: the arguments whose values belong to the form of a call.

    Attributes:
        held: the parameters, buffers and sources of each stage in any of these calls, which all other code
            has to fit.
        loaded: the buffers to be read in the place of the model's.
    """

    def __init__(
        self, model: nn.Module, forms: Sequence[CallForm], names: Sequence[str], known: Constants
    ) -> None:
        self.model, self.forms, self.names, self.known = model, tuple(forms), tuple(names), known
        self.stages = len(names) + 1
        self.loaded: dict[str, Tensor] = {}
        self.held: tuple[Footprint, ...] = ()
        self._inputs: tuple[Sequence[LeafForm], ...] = ()  # in each of the calls at the split
        self._readers: dict[str, int] = {}  # the first stage that reads each parameter
        self._homes: dict[str, int] = {}  # the stages of buffers that are state
        self._codes: OrderedDict[Hashable, tuple[StageCode, ...]] = OrderedDict()
        self._watch = Watch(model)
        self._moved: dict[tuple[str, torch.device], tuple[Tensor, Tensor]] = {}

    def with_buffers(self, loaded: Mapping[str, Tensor]) -> "Source":
        """Return the source of the same code with other buffers."""
        other = copy(self)
        other.loaded = {**self.loaded, **loaded}
        return other

    @property
    def cut(self) -> str:
        """Name the model, its cuts, and a digest of the names that its stages hold: the same on all ranks."""
        held = sha256(repr([(code.params, code.state) for code in self.held]).encode()).hexdigest()[:16]
        return f"{type(self.model).__name__} cut at {', '.join(self.names) or 'no module'} ({held})"

    @property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """List the pairs of stages between which values travel that are not neighbours."""
        pairs = ((a, b) for b, held in enumerate(self.held) for a in held.received)
        return tuple(sorted((a, b) for a, b in pairs if a < b - 1))

    def hold(
        self,
        calls: Sequence[tuple[Sequence[LeafForm], Trace]],
        device: torch.device,
        state: Sequence[str] = (),
    ) -> None:
        """Make the code of the calls at the split, and note the tensors that the stages hold.

        Args:
            calls: the forms of the inputs of each call, and its trace.
            device: the device of the stages.
            state: patterns of names of buffers that are state, though the model only reads them.

        Raises:
            StageError, ValueError: the model cannot be cut there, or a pattern names no buffer that is read.
        """
        self._inputs, traces = zip(*calls, strict=True)
        for name in self.names:
            if all(name not in traced.starts for traced in traces):
                raise ValueError(
                    f"at: the module {name} is not called, or calls no operator; name another one, or the"
                    " modules within it"
                )
        read: dict[str, int] = {}
        for traced in sorted(traces, key=lambda t: len(t.starts.keys() & {*self.names}), reverse=True):
            _label_stages(self.names, traced, self._readers)
            self._readers = readers(traced, traced.params) | self._readers
            read = readers(traced, traced.buffers) | read
            self._homes = state_buffers(traced) | self._homes
        for pattern in state:
            if not (named := fnmatch.filter(read, pattern)):
                raise ValueError(
                    f"state: {pattern!r} is no name of a buffer that the model reads, which are"
                    f" {', '.join(read) or 'none'}"
                )
            self._homes = {name: read[name] for name in named} | self._homes
        made = [
            self.codes(form, inputs, device, traced)
            for form, (inputs, traced) in zip(self.forms, calls, strict=True)
        ]
        self.held = tuple(map(Footprint.of, zip(*made, strict=True)))

    def codes(
        self,
        form: CallForm,
        inputs: Sequence[LeafForm],
        device: torch.device,
        traced: Trace | None = None,
        compute: torch.dtype | None = None,
    ) -> tuple[StageCode, ...]:
        """Return the code of every stage for a call with inputs of these forms.

        Args:
            form: the form of the call.
            inputs: the forms of its tensors.
            device: the device of the stages.
            traced: the trace of the model for them, by default made here.
            compute: the dtype of all floating parameters, by default that of each in the model.

        Raises:
            StageError: the model cannot be traced, or the stages would not be those of the split.
        """
        mapped = vmapped()
        key = (
            *inputs,
            device,
            compute,
            mapped,
            form.key,
            self._watch.state(),
            tuple((p.requires_grad, p.dtype) for p in self.model.parameters()),
            ambient(),
        )
        with process_lock:
            if key not in self._codes:
                if traced is None:
                    traced = self._trace(form, inputs, device, compute, mapped)
                _label_stages(self.names, traced, self._readers)
                parts = cut(traced, self.stages, self._homes)
                _require_fit(self.held, parts)
                self._codes[key] = stage_codes(traced, parts, Region(True, autocast()), mapped)
                while len(self._codes) > _MOST:
                    self._codes.popitem(last=False)
            self._codes.move_to_end(key)
            return self._codes[key]

    def compute_dtype(
        self, params: Mapping[str, Tensor], before: torch.dtype | None, stage: int
    ) -> torch.dtype | None:
        """Find the dtype to which a step casts all floating parameters.

        Args:
            params: the parameters of a stage.
            before: the dtype that was found in the stage before.

        Returns:
            The dtype; None where each parameter has the dtype of the model.

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

    def _trace(
        self,
        form: CallForm,
        inputs: Sequence[LeafForm],
        device: torch.device,
        compute: torch.dtype | None,
        mapped: bool,
    ) -> Trace:
        try:
            return trace(self.model, form, inputs, device, compute, mapped)
        except StageError as error:
            calls = [*zip(self.forms, self._inputs, strict=True)]
            got, known = _without_rows(form, inputs), [_without_rows(*call) for call in calls]
            if got in known:
                raise
            expected = " or ".join(call.described(leaves) for call, leaves in calls)
            raise StageError(
                error.stage,
                f"called with {form.described(inputs)}, where the split had {expected}, {error.reason}",
                "give inputs of the form at the split, several microbatches as ppfunc.Microbatches([...]); or"
                " split with one example of each form, ppfunc.split(model, ppfunc.Microbatches([...]))",
            ) from error


class Footprint(NamedTuple):
    """Describe the tensors that a stage reads and writes in any of several calls of the model.

    Args:
        params, constants, state: names of the tensors of the model.
        received: the stages from which it takes values.
    """

    params: tuple[str, ...]
    constants: tuple[str, ...]
    state: tuple[str, ...]
    received: tuple[int, ...]

    @classmethod
    def of(cls, codes: Sequence[StageCode]) -> Self:
        """Put together the tensors that the code of one stage holds, for all calls."""
        parts = [code.part for code in codes]
        each = zip(*((p.params, p.constants, p.state, p.received) for p in parts), strict=True)
        return cls(*(tuple(dict.fromkeys(chain.from_iterable(names))) for names in each))


def _without_rows(form: CallForm, inputs: Sequence[LeafForm]) -> str:
    """Describe a call by the forms of the rows of its inputs, however many they are."""
    return form.described([leaf._replace(shape=leaf.shape[1:]) for leaf in inputs])


def _label_stages(names: Sequence[str], traced: Trace, home: Mapping[str, int]) -> None:
    """Give each operator its stage; see `_begins` for the arguments."""
    operators = [node for node in traced.nodes if node.op == "call_function"]
    bounds = [0, *_begins(names, traced, home), len(operators)]
    for stage, (start, end) in enumerate(pairwise(bounds)):
        for node in operators[start:end]:
            node.meta["stage"] = stage


def _begins(names: Sequence[str], traced: Trace, home: Mapping[str, int]) -> list[int]:
    """Find the operators with which stages begin.

    A stage whose module is not called begins where a parameter of it, or of a later one, is read.

    Args:
        names: the names of the modules at which the stages after the first begin.
        traced: a trace of the model.
        home: the first stage that reads each parameter in other calls.

    Raises:
        ValueError: the named modules are not called in this order, or a stage would have no operator.
    """
    called = [name for name in names if name in traced.starts]
    begins = [traced.starts[name] for name in called]
    if begins != sorted(begins):
        real = sorted(called, key=traced.starts.__getitem__)
        raise ValueError(f"at: got {called}, expected the order in which they are called, {real}")
    operators = [node for node in traced.nodes if node.op == "call_function"]
    if len(called) < len(names):
        stages = {node: home.get(name, 0) for name, node in traced.params.items()}
        reads = [max((stages.get(n, 0) for n in node.all_input_nodes), default=0) for node in operators]
        ends = [len(operators)]
        for stage, name in reversed([*enumerate(names, 1)]):
            own = (at for at, read in enumerate(reads[: ends[0]]) if read >= stage)
            ends.insert(0, traced.starts.get(name, next(own, ends[0])))
        return [*accumulate(ends[:-1], max)]
    for (before, start), (name, end) in pairwise([("", 0), *zip(names, begins, strict=True)]):
        if start == end:
            where = f"at the same operator as {before}" if before else "at the first operator of the model"
            raise ValueError(
                f"at: the module {name} begins {where}, which leaves a stage without any; leave one out"
            )
    return begins


def _require_fit(held: Sequence[Footprint], parts: Sequence[StagePart]) -> None:
    """Raise where stages take a DTensor, or parameters, state or values that the split does not have."""
    when = "for the inputs, the mode or the modules that it has now, and did not at the split"
    mend = "split with inputs of this form, in this mode (training or evaluation)"
    for stage, part in enumerate(parts):
        for source, nodes in part.received.items():
            if laid := [node for node in nodes if node.meta["laid"]]:
                raise StageError(
                    f"stage {stage}",
                    f"it takes the value {_described(laid[0])}, a DTensor, from stage {source}",
                    "cut where activations are plain tensors, as use_local_output=True makes them",
                )
        if not held:  # at the split
            continue
        reads = [name for name in part.params if name not in held[stage].params]
        writes = [name for name in part.state if name not in held[stage].state]
        takes = [a for a in part.received if a < stage - 1 and a not in held[stage].received]
        if reads or writes or takes:
            what = (
                f"reads the parameter {reads[0]}"
                if reads
                else f"writes into the buffer {writes[0]}"
                if writes
                else f"takes the value {_described(part.received[takes[0]][0])}, from stage {takes[0]}"
            )
            raise StageError(f"stage {stage}", f"it {what} {when}", mend)


def _described(node: Node) -> str:
    """Name a value, its shape, and the line that makes it."""
    shape = list(node.meta["value"].shape)
    return f"{node.name.removeprefix('v_')} of shape {shape}{node.meta.get('place', '')}"
