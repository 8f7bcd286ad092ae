"""Note the storages that live while calls run without values: their kinds, and the peak of their bytes."""

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import nlargest
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from ppfunc._checks import table
from ppfunc.schedule.instruction import COMMUNICATION, TAIL, Instruction, Op
from ppfunc.stage._torch import FakeTensor, TorchDispatchMode, without_function_modes, without_modes
from ppfunc.stage.errors import place_of_call
from ppfunc.stage.tree import tree_leaves

_LARGEST = 10
_WITHIN = "workspace", "again"  # kinds of storages that nothing keeps yet
_CALLED_AT = ", called at "  # between an operator and its line
_RUN = str(Path(__file__).with_name("analysis.py"))  # which runs the calls
_BUFFER = "aten.empty.memory_format"
_READ, _PIN = torch.ops.aten._local_scalar_dense.default, torch.ops.aten._pin_memory.default
_ADD = torch.ops.aten.add.Tensor
_COPY = torch.ops.aten._foreach_copy_.default


class Bytes(NamedTuple):
    """Count bytes by kind.

    Args:
        params: parameters that stages compute with, and the states of stages, as they were given, or cast.
        masters: parameters as the state of a trainer keeps them, if those are others.
        shards: the parts that this rank keeps of parameters that are whole only while they are used.
        gathered: such parameters while they are whole.
        optimizer: the state of the optimizer.
        batch: inputs, targets, extras, weights and counts that this rank reads; the caller holds them to the
            end.
        gradients: sums of gradients over microbatches, with the buckets that are summed over ranks.
        residuals: kept by forwards for their backwards, and by input gradients for weight gradients.
        messages: activations and their gradients on their way.
        outputs: kept for the caller: losses, outputs, metrics, aux, the last state.
        updated: new parameters and optimizer state beside the old ones.
        workspace: within a program that runs, until it ends.
        again: share of the workspace that a backward computes once more.
    """

    params: int = 0
    masters: int = 0
    shards: int = 0
    gathered: int = 0
    optimizer: int = 0
    batch: int = 0
    gradients: int = 0
    residuals: int = 0
    messages: int = 0
    outputs: int = 0
    updated: int = 0
    workspace: int = 0
    again: int = 0


class Allocation(NamedTuple):
    """Describe a tensor, or several that share memory.

    Args:
        size: size in bytes.
        kind: a field of :class:`Bytes`.
        instruction: instruction that made it; None for arguments and for results.
        name: path of the tensor, or the operator that has made it.
        line: line of the user's code, ``file:line``, whose operator or gradient it is; else, as for layers
            of torch, the path of the module; empty if unknown.
    """

    size: int
    kind: str
    instruction: Instruction | None
    name: str
    line: str

    @property
    def stage(self) -> int | None:
        """Return the stage of the schedule whose instruction made the tensor.

        Returns:
            The number of the stage; None for arguments and for results.
        """
        return None if self.instruction is None else self.instruction.stage


class Moment(NamedTuple):
    """Count bytes in an instruction.

    Args:
        instruction: instruction of the schedule.
        most: peak of the bytes while it runs.
        after: bytes that are held when it has run, by kind.
    """

    instruction: Instruction
    most: int
    after: Bytes


class Memory(NamedTuple):
    """Count the bytes that one rank holds over a step, as a process of its own.

    Each storage is counted once. Kernels may take more within, and an allocator rounds.

    Args:
        peak: peak of the bytes, arguments included.
        at: instruction of the peak; None for the end, when results are made.
        held: bytes at the peak, by kind.
        most: peak of each kind by itself, in bytes.
        largest: ten largest tensors at the peak.
        moments: bytes in every instruction of the schedule, in order.
    """

    peak: int
    at: Instruction | None
    held: Bytes
    most: Bytes
    largest: tuple[Allocation, ...]
    moments: tuple[Moment, ...]

    def __repr__(self) -> str:
        return f"Memory(peak={self.peak}, at={self.at}, held={self.held}, most={self.most}, ...)"

    def __str__(self) -> str:
        """Write the peak by kind, and its largest tensors."""
        kinds = zip(Bytes._fields, self.held, self.most, strict=True)
        rows = [row for row in kinds if row[2]]
        tensors = [
            (h.size, h.kind, "" if h.stage is None else h.stage, str(h.instruction or ""), h.line, h.name)
            for h in self.largest
        ]
        return (
            f"{self.peak} bytes at most, in {self.at or 'the end'}\n"
            f"{table(['kind', 'then', 'most'], rows)}\n"
            + table(["bytes", "kind", "stage", "made in", "line", "name"], tensors)
        )


@dataclass(slots=True, eq=False)
class _Storage:
    """Describe a storage.

    Args:
        size: size in bytes.
        name, place: operator that has made it, and instruction.
        kinds: pairs of a time and a kind: from its birth on, after each change, and ``""`` at its end.
    """

    size: int
    name: str
    place: Instruction | None
    kinds: list[tuple[int, str]]

    def settle(self, kind: str) -> str:
        """Set the kind of a storage that nothing keeps yet, for all its life; return the kind before."""
        start, now = self.kinds[-1]
        if now in _WITHIN:
            self.kinds[-1] = start, kind
        return now

    def kind(self, time: int) -> str:
        """Return the kind at a time, ``""`` outside its life."""
        return next((kind for start, kind in reversed(self.kinds) if start <= time), "")


class Ledger(TorchDispatchMode):
    """Notes the storages that operators make, their lives and their kinds.

    Args:
        device: device whose bytes count; tensors elsewhere, such as those offloaded to the host, have none.

    Attributes:
        now: time, in births, deaths and changes of kind.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self.now = device, 0
        self._place: Instruction | None = None  # of the running call
        self._storages: list[_Storage] = []
        self._known: dict[int, _Storage] = {}  # by address
        self._begun = 0  # storages that were there when the running call began

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _READ and self._place is not None and self._place.op in TAIL:
            return args[0].dtype.is_floating_point and 0.0  # to what asks for infinite numbers
        if func is _COPY and self._place is not None and self._place.op is Op.STEP:
            for copy, copied in zip(*args[:2], strict=True):  # which an update writes into
                self.name(copy, self._note(copied, "").name)
        result = args[0] if func is _PIN else func(*args, **(kwargs or {}))
        place = place_of_call(_RUN)
        # Sums have the names of their terms.
        summed = args[0] if str(func).startswith("aten._foreach") else ()
        if func is _ADD and not place:
            summed = args[:1]
        for t, term in zip_longest(tree_leaves(result), summed):
            if isinstance(t, torch.Tensor) and t.layout is torch.strided:
                self._note(t, f"{func}{place}" if term is None else self._note(term, "").name)
        return result

    def _note(self, tensor: torch.Tensor, name: str) -> _Storage:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._know(storage, tensor.device, name)
        return self._known[storage._cdata]

    def _know(self, storage: Any, device: torch.device, name: str, kind: str = _WITHIN[0]) -> None:
        key, size = storage._cdata, storage.nbytes() * (device.type == self._device.type)
        self.now += 1
        self._known[key] = _Storage(size, name, self._place, [(self.now, kind)])
        self._storages.append(self._known[key])
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._change(self._known.pop(key), "")

    def _change(self, storage: _Storage, kind: str) -> None:
        self.now += 1
        storage.kinds.append((self.now, kind))

    @property
    def live(self) -> int:
        """Return the bytes that are alive now."""
        return sum(s.size for s in self._known.values())

    def make(self, like: torch.Tensor, within: torch.Tensor | None, name: str, again: bool) -> torch.Tensor:
        """Make a tensor like another, in new memory or within the memory of a tensor.

        Operators would take several times as long.
        """
        with without_function_modes(), without_modes():
            bare = torch.empty(0, dtype=like.dtype, device="meta")
            if within is None:
                size = like.untyped_storage().nbytes()
                storage = torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage()
                self._know(storage, like.device, name, _WITHIN[again])
            else:
                storage = within.untyped_storage()
            bare.set_(storage, like.storage_offset(), like.shape, like.stride())
            return FakeTensor(self._evaluation, bare, like.device)

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Name the storage of a tensor."""
        self._note(tensor, name).name = name

    def __enter__(self) -> Self:
        self._evaluation = torch.empty(()).fake_mode  # type: ignore[attr-defined]
        return super().__enter__()

    def begin(self, place: Instruction | None) -> None:
        """Begin a call."""
        self._place, self._begun = place, len(self._storages)

    @property
    def owner(self) -> str:
        """Name the stage whose call runs."""
        return "a stage" if self._place is None else f"stage {self._place.stage}"

    def mark(self, kind: str, tensors: Iterable[Any], *, also: str | None = None, name: str = "") -> None:
        """Mark storages as of a kind: those that are of none yet, or of the kind ``also``; name new ones."""
        for t in tensors:
            if isinstance(t, torch.Tensor) and (s := self._note(t, name or kind)).settle(kind) == (
                also or None
            ):
                self._change(s, kind)

    def mark_rest(self, kind: str) -> None:
        """Mark the storages of no kind yet that the running call has made and leaves behind."""
        for s in self._storages[self._begun :]:
            s.settle(kind)

    def memory(self, calls: Iterable[tuple[Instruction, list[tuple[int, int]]]]) -> Memory:
        """Describe the most bytes that lived at once, and the bytes in instructions.

        Args:
            calls: instructions, each with start and end of its calls.
        """
        changes: dict[int, Counter[str]] = defaultdict(Counter)
        for s in self._storages:
            for (start, kind), (stop, _) in pairwise([*s.kinds, (self.now + 1, "")]):
                if kind:
                    changes[start][kind] += s.size
                    changes[stop][kind] -= s.size
        held, most, history = Counter[str](), Counter[str](), list[Bytes]()
        for time in range(self.now + 1):
            held.update(changes.get(time, ()))
            most |= held
            history.append(Bytes(**held))
        totals, moments = list(map(sum, history)), list[Moment]()
        for instruction, spans in calls:
            after = history[spans[-1][1]] if spans else moments[-1].after if moments else history[-1]
            highest = (max(totals[start : end + 1]) for start, end in spans)
            moments.append(Moment(instruction, max(highest, default=sum(after)), after))
        time = totals.index(peak := max(totals))
        there = [s for s in self._storages if s.kind(time)]
        largest = nlargest(_LARGEST, there, key=lambda s: (s.size, s.kinds[0]))
        place = next((s.place for s in there if s.kinds[0][0] == time), None)
        rows = tuple(_allocation(s, time) for s in largest)
        return Memory(peak, place, history[time], Bytes(**most), rows, tuple(moments))


def _allocation(storage: _Storage, time: int) -> Allocation:
    comes = storage.place is not None and storage.place.op in COMMUNICATION
    name = "received" if comes and storage.name.startswith(_BUFFER) else storage.name
    name, _, line = name.partition(_CALLED_AT)
    return Allocation(storage.size, storage.kind(time), storage.place, name, line)
