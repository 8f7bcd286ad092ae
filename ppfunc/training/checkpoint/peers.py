"""Let the ranks that save or load together exchange small values, as JSON over a process group of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .errors import CheckpointError
from .tensor_file import bytes_of

Group = ProcessGroup | DeviceMesh | None
"""The ranks that save or load together: by default all of ``torch.distributed``, or this process where that is not initialised."""

_KINDS = {kind.__name__: kind for kind in (CheckpointError, FileExistsError, FileNotFoundError, ValueError, TypeError)}


class Peers:
    """The ranks that save or load together: every one of them makes one, at the same point of its program.

    A context manager that ends its process group: peers that still wait in it raise.

    Raises:
        ValueError: this process is none of the ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group: ProcessGroup | None = None
        ranks, own = _ranks(group)
        if own not in ranks:
            raise ValueError(f"group: got one of the ranks {ranks}, this process is rank {own}; call it on the ranks of the group only")
        self.rank, self.size = ranks.index(own), len(ranks)
        if self.size > 1:
            self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True, group_desc="ppfunc checkpoint")

    def exchange(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order; JSON."""
        if self._group is None:
            return [value]
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros((), dtype=torch.int64) for _ in range(self.size)]
        try:
            dist.all_gather(sizes, torch.tensor(own.numel()), group=self._group)
            padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
            padded[: own.numel()] = own
            texts = [torch.empty_like(padded) for _ in sizes]
            dist.all_gather(texts, padded, group=self._group)
        except RuntimeError as error:
            raise CheckpointError(f"a rank is gone, or has given up ({str(error).splitlines()[0][:300]})") from error
        return [json.loads(bytes(bytes_of(text)[: int(size)])) for text, size in zip(texts, sizes, strict=True)]

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """Run ``work`` on every rank; where it raises on one, all raise, with its kind and the rank.

        Returns:
            What every rank has found; JSON.
        """
        found, failure = None, None
        try:
            found = work()
        except BaseException as error:
            failure = error
        told = self.exchange([found, failure and [type(failure).__name__, str(failure)[:2000]]])
        if failure is not None:
            raise failure
        for rank, (_, raised) in enumerate(told):
            if raised:
                kind = _KINDS.get(raised[0])
                raise (kind or CheckpointError)(f"rank {rank}: {'' if kind else raised[0] + ': '}{raised[1]}")
        return [found for found, _ in told]

    def close(self) -> None:
        """End the process group."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _ranks(group: Group) -> tuple[list[int], int]:
    """The ranks of a group, and this one, as the world numbers them."""
    if isinstance(group, DeviceMesh):
        return group.mesh.flatten().tolist(), dist.get_rank()
    if group is not None and not isinstance(group, ProcessGroup):
        raise TypeError(f"group: got {type(group).__name__}, expected a ProcessGroup, a DeviceMesh, or None for all ranks")
    if group is None and not dist.is_initialized():
        return [0], 0
    return dist.get_process_group_ranks(group), dist.get_rank()
