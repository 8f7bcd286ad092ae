"""Operators of a simulated accelerator: a fallback for every operator of torch that gets a tensor of it.

The shapes come from the operator on meta tensors, the numbers from the same operator on the CPU, later.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import torch
from optree import tree_unflatten

from .device import Device
from .streams import Stream

aten = torch.ops.aten
_STAGED = 65536  # bytes of pageable memory that the driver copies aside, so that the host need not wait
_DRAWS = torch.Tag.nondeterministic_seeded
_DEPENDS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_KINDS = {"_local_scalar_dense": "item"}


class Operators:
    """Issues operators on the streams of a device."""

    def __init__(self, device: Device, generators: tuple[torch.Generator, ...]) -> None:
        self.device, self.generators = device, generators
        self._shapes: dict[Any, Any] = {}
        self._served: set[str] = set()

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        name = op.name().removeprefix("aten::")
        special = _SPECIAL.get(name)
        args = tuple(map(_tensor_of, args, op._schema.arguments))
        with torch._C._AutoDispatchBelowAutograd():
            if special is not None:
                return special(self, *args, **kwargs)
            flat, spec = tree_flatten((args, kwargs))
            index = _device_of(name, flat, self.device.index)
            if any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns):
                return self._view(op, args, kwargs)
            return self._compute(op, name, _Call(op, args, kwargs, flat, spec), index)

    def _compute(self, op: Any, name: str, call: _Call, index: int) -> Any:
        device, stream = self.device, self.device.current(index)
        if name not in self._served:
            if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), "CPU"):
                raise NotImplementedError(f"{op.name()} has no kernel for the CPU; it is not simulated")
            self._served.add(name)
        seed = self._drawn(op, call.kwargs, index)
        if call.written or not op._schema.returns:
            self._resize(call)
            device.issue(stream, name, call.bound(device, seed), call.read(), call.written)
            return call.results()
        try:
            if _DEPENDS & set(op.tags):
                raise NotImplementedError
            shown = self._shown(call)
        except NotImplementedError:  # shapes or numbers that depend on values
            return self._await(name, call, seed, stream)
        made = [None if s is None else device.memory.empty(*s, index) for s in shown[0]]
        outputs = [None if t is None else device.host_view(t) for t in made]
        writes = [t for t in made if t is not None]
        device.issue(stream, name, call.bound(device, seed, outputs), call.read(), writes)
        return tree_unflatten(shown[1], made)

    def _shown(self, call: _Call) -> tuple[list[Any], Any]:
        """Return size, stride and dtype of the results, by a call on meta tensors."""
        key = call.key()
        if key is None or key not in self._shapes:
            leaves, spec = tree_flatten(call.on(_meta))
            if not all(t is None or isinstance(t, torch.Tensor) for t in leaves):
                raise NotImplementedError
            shown = [None if t is None else (t.size(), t.stride(), t.dtype) for t in leaves], spec
            if key is None:
                return shown
            self._shapes[key] = shown
        return self._shapes[key]

    def _resize(self, call: _Call) -> None:
        """Give empty tensors that an operator writes the shapes that it gives them."""
        if all(t.numel() for t in call.written):
            return
        metas = [_meta(leaf) for leaf in call.flat]
        given = iter(metas)
        call.on(lambda leaf: next(given))
        for tensor, meta in zip(call.flat, metas, strict=True):
            if isinstance(tensor, torch.Tensor) and tensor.size() != meta.size():
                index = tensor.device.index
                tensor.data = self.device.memory.empty(meta.size(), meta.stride(), tensor.dtype, index)

    def _drawn(self, op: Any, kwargs: Any, index: int) -> list[int] | None:
        """Draw the seed of an operator that draws."""
        if _DRAWS not in op.tags:
            return None
        if not any(a.name == "generator" for a in op._schema.arguments):
            raise NotImplementedError(f"{op.name()} draws from no generator; it is not simulated")
        generator = kwargs.get("generator") or self.generators[index]
        if generator.device.type != "cuda":
            got = f"Expected a 'cuda' device type for generator but found '{generator.device.type}'"
            raise RuntimeError(got)
        offset = generator.get_offset()
        generator.set_offset(offset + 4)
        return [hash((generator.initial_seed(), offset)) & (2**63 - 1)]

    def _await(self, name: str, call: _Call, seed: list[int] | None, stream: Stream) -> Any:
        """Run an operator whose results the host needs, and wait for them."""
        device, results = self.device, list[Any]()
        run = call.bound(device, seed)
        mark = device.issue(stream, name, lambda: results.append(run()), call.read())
        device.wait(_KINDS.get(name, name), mark)
        return _map_tensors(lambda host: self._uploaded(host, stream), results[0])

    def _uploaded(self, host: torch.Tensor, stream: Stream) -> torch.Tensor:
        made = self.device.memory.empty(host.size(), host.stride(), host.dtype, stream.device)
        target = self.device.host_view(made)
        self.device.issue(stream, "result", lambda: target.copy_(host), writes=[made])
        return made

    def _view(self, op: Any, args: Any, kwargs: Any) -> Any:
        base = args[0]
        shown = op(*_map_tensors(self.device.host_view, args), **kwargs)

        def again(host: torch.Tensor) -> torch.Tensor:
            made = aten.view.dtype(base, host.dtype) if host.dtype != base.dtype else aten.alias(base)
            return aten.as_strided_(made, host.size(), host.stride(), host.storage_offset())

        return _map_tensors(again, shown)

    # Operators that need more than their schema tells

    def empty(
        self, size: Any, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any
    ) -> Any:
        layout = memory_format or torch.contiguous_format
        shown = torch.empty(size, dtype=dtype, device="meta", memory_format=layout)
        return self.device.memory.empty(shown.size(), shown.stride(), shown.dtype, self._index(device))

    def empty_strided(
        self, size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any
    ) -> Any:
        dtype = dtype or torch.get_default_dtype()
        return self.device.memory.empty(size, stride, dtype, self._index(device))

    def _index(self, device: Any) -> int:
        return self.device.index if device is None or device.index is None else device.index

    def copy_(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not target.numel():
            return target
        if target.is_cuda and source.is_cuda:
            self._copy_on_devices(target, source)
        elif target.is_cuda:
            self._copy_in(target, source, non_blocking)
        else:
            self._copy_out(target, source, non_blocking)
        return target

    def _copy_on_devices(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on the stream of the source; between two devices both streams wait before and after."""
        device = self.device
        there, here = device.current(source.device.index), device.current(target.device.index)
        if there is not here:
            device.order(device.mark(here), there)
        to, of = device.host_view(target), device.host_view(source)
        device.issue(there, "copy", lambda: to.copy_(of), [source], [target])
        if there is not here:
            device.order(device.mark(there), here)

    def _copy_in(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        device, size = self.device, source.numel() * source.itemsize
        pinned = source.is_pinned()
        to, of = device.host_view(target), source if pinned else source.clone()
        stream = device.current(target.device.index)
        mark = device.issue(stream, "copy from the host", lambda: to.copy_(of), [of], [target])
        if not non_blocking:
            device.wait("copy from the host", mark)
        elif not pinned and size > _STAGED:
            device.wait("copy of much pageable memory", mark)

    def _copy_out(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        """Copy to the host, which waits unless the memory is pinned; there it finds NaN until then.

        What has gaps or another order there goes by way of pageable memory, and waits too.
        """
        device, of = self.device, self.device.host_view(source)
        dense = torch.ops.aten.is_non_overlapping_and_dense.default(target)
        as_it_lies = target.is_contiguous() or (dense and target.stride() == source.stride())
        late = non_blocking and target.is_pinned() and as_it_lies
        if late and target.is_contiguous():
            ctypes.memset(target.data_ptr(), 255, target.numel() * target.itemsize)
        stream = device.current(source.device.index)
        mark = device.issue(stream, "copy to the host", lambda: target.copy_(of), [source], [target])
        if not late:
            device.wait("copy to the host", mark)

    def record_stream(self, tensor: torch.Tensor, stream: torch.Stream) -> None:
        if not self.device.omits("record_stream"):
            there = self.device.stream(stream.device_index, stream.stream_id)
            self.device.record_stream(tensor, there)

    def resize_(self, tensor: torch.Tensor, size: Any, *, memory_format: Any = None) -> torch.Tensor:
        shown = torch.empty(size, device="meta")
        if shown.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            index = tensor.device.index
            tensor.data = self.device.memory.empty(shown.size(), shown.stride(), tensor.dtype, index)
            return tensor
        return aten.as_strided_(tensor, shown.size(), shown.stride(), tensor.storage_offset())

    def native_dropout(self, x: torch.Tensor, p: float, train: bool | None) -> Any:
        """Draw by an operator that takes a generator."""
        if train is False or not p:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        keep = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
        return x * keep * (0.0 if p == 1 else 1 / (1 - p)), keep

    def fused_sdp_choice(self, *args: Any, **kwargs: Any) -> int:
        return 0  # the one of ordinary operators


_SPECIAL: dict[str, Callable[..., Any]] = {
    "empty.memory_format": Operators.empty,
    "empty_strided": Operators.empty_strided,
    "copy_": Operators.copy_,
    "record_stream": Operators.record_stream,
    "resize_": Operators.resize_,
    "native_dropout": Operators.native_dropout,
    "_fused_sdp_choice": Operators.fused_sdp_choice,
}
OWN = (
    "empty.memory_format",
    "empty_strided",
    "copy_",
    "record_stream",
    "resize_",
)  # others serve all devices


class _Call:
    """An operator and its arguments."""

    def __init__(self, op: Any, args: Any, kwargs: Any, flat: list[Any], spec: Any) -> None:
        self.op, self.args, self.kwargs, self.flat, self._spec = op, args, kwargs, flat, spec
        self._returned = [
            args[n] if n < len(args) else kwargs.get(a.name)
            for n, a in enumerate(op._schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        self.written = [t for t in tree_flatten(self._returned)[0] if isinstance(t, torch.Tensor)]

    def read(self) -> list[torch.Tensor]:
        tensors = (t for t in self.flat if isinstance(t, torch.Tensor) and t.is_cuda)
        return [t for t in tensors if not any(t is w for w in self.written)]

    def results(self) -> Any:
        """Return the arguments that it writes, as it does."""
        count = len(self.op._schema.returns)
        return None if not count else self._returned[0] if count == 1 else tuple(self._returned)

    def on(self, change: Callable[[Any], Any]) -> Any:
        """Call it with changed leaves, and with no generator."""
        args, kwargs = tree_unflatten(self._spec, [change(leaf) for leaf in self.flat])
        kwargs.pop("generator", None)
        return self.op(*args, **kwargs)

    def key(self) -> Any:
        """Return what its shapes depend on, or None where that cannot be compared."""
        leaves = [
            (tuple(x.size()), x.stride(), x.dtype, x.is_cuda) if isinstance(x, torch.Tensor) else (type(x), x)
            for x in self.flat
        ]
        key = self.op, self._spec, tuple(leaves)
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def bound(
        self, device: Device, seed: list[int] | None, outputs: list[Any] | None = None
    ) -> Callable[[], Any]:
        """Return what runs it on the memory of its arguments, as it is then."""
        op, spec = self.op, self._spec
        hosts = [_on_host(device, leaf) for leaf in self.flat]

        def run() -> Any:
            args, kwargs = tree_unflatten(spec, hosts)
            if seed is not None:
                kwargs["generator"] = torch.Generator().manual_seed(seed[0])
            results = op(*args, **kwargs)
            if outputs is not None:
                for target, value in zip(outputs, tree_flatten(results)[0], strict=True):
                    if target is not None:
                        target.copy_(value)
            return results

        return run


tree_flatten = partial(optree.tree_flatten, none_is_leaf=True)


def _map_tensors(change: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    leaves, spec = tree_flatten(tree)
    return tree_unflatten(spec, [change(x) if isinstance(x, torch.Tensor) else x for x in leaves])


def _tensor_of(value: Any, argument: Any) -> Any:
    """Return a tensor for an integer in the place of one, which not every operator takes again."""
    return torch.tensor(value) if isinstance(value, int) and str(argument.type) == "Tensor" else value


def _meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and (leaf.is_cuda or leaf.dim()):
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def _on_host(device: Device, leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return device.host_view(leaf) if leaf.is_cuda else leaf.clone()
    if isinstance(leaf, torch.device) and leaf.type == "cuda":
        return torch.device("cpu")
    return None if isinstance(leaf, torch.Generator) else leaf


def _device_of(name: str, flat: list[Any], current: int) -> int:
    """Return the index of the device that an operator runs on; tensors of two raise, as in torch."""
    tensors = [t for t in flat if isinstance(t, torch.Tensor)]
    devices = {t.device for t in tensors if t.is_cuda or t.dim()}
    if len(devices) > 1 and not (name.startswith(("index", "_index")) and len({*devices} - {_CPU}) == 1):
        found = " and ".join(sorted(map(str, devices)))
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {found}!"
            f" ({name})"
        )
    named = [d for d in flat if isinstance(d, torch.device) and d.type == "cuda"]
    index = next((d.index for d in (*(devices - {_CPU}), *named)), None)
    return current if index is None else index


_CPU = torch.device("cpu")
