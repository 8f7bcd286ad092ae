"""Run all ranks in one process: for tests, notebooks, one GPU, and torch.func transforms from outside.

Those on paper have no processes: steps are lowered for them, and none runs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ppfunc._checks import naming_arguments
from ppfunc.stage.device import available

from ..lowering.results import sum_up
from ..ports.protocols import (
    Among,
    Axes,
    Call,
    Collective,
    LossPart,
    Mode,
    ShardWhat,
    Transfer,
    Transport,
    Wait,
    grid_of,
    require_shardable,
)
from ..values.arguments import LaidOut
from ..values.buffers import Buffers, Compared, moved
from ..values.errors import AgreementError, Failure, PipelineError


class InProcess(Transport):
    """Carries messages of a pipeline whose ranks all live in this process and this thread.

    The calls of all ranks run in one order in which everything that a call consumes has been produced before,
    so none ever waits: a message is an entry of ``buffers.values``, moved to the consumer's device where that
    differs. It owns nothing, so steps may share it, also between threads.
    """

    generation, ended, has_peers, has_other_pipelines = 0, 0, False, False
    compares_layouts, mixes_batches = False, False
    mesh: DeviceMesh | None = None
    axes, device = Axes(), torch.device("cpu")
    shard: ShardWhat = "none"

    def __repr__(self) -> str:
        return "InProcess()"

    def end(
        self,
        losses: Mapping[int, torch.Tensor],
        parts: Mapping[int, LossPart],
        mode: Mode = "mixed",
        compared: Sequence[Compared] = (),
        changed: Mapping[str, str] | None = None,
    ) -> torch.Tensor | None:
        for values, require in compared:
            require(values)
        last = losses[max(parts)].device if parts else None
        return sum_up([losses[stage].to(last) for stage in sorted(parts)], parts) if parts else None

    def fail(self, failure: Failure) -> BaseException:
        if failure.instruction is None or isinstance(failure.cause, AgreementError):
            return failure.cause
        return PipelineError(failure.rank, failure.position, failure.instruction, failure.reason)

    def wait(self, transfer: Transfer) -> Call | None:
        tag, device = transfer.tag, transfer.device
        if transfer.outgoing or not available():
            return None

        def move(buffers: Buffers) -> None:
            buffers.values[tag] = moved(buffers.values[tag], device)

        return move


class CollectiveOnPaper(Collective):
    """Stands for a collective: holds its tensors until it is waited for, and moves nothing."""

    @classmethod
    def of(cls, other: Collective) -> Collective:
        """Return a stand-in for a collective, with its size and index."""
        return cls(other.size, other.index)

    def _begin(self, operation: Callable[..., Any], tensor: torch.Tensor, *args: Any) -> Wait:
        return [tensor, *args].clear


class MessagesOnPaper(InProcess):
    """Holds the messages of one rank as :class:`P2P` does, and moves nothing."""

    def collective(self, among: Among) -> Collective:
        return CollectiveOnPaper(len(among))

    def post(self, batch: Sequence[Transfer]) -> Call:
        from .pair_groups import joining  # what processes alone need

        joins = [joining(each) if each.device.type == "cpu" else None for each in batch]

        def post_all(buffers: Buffers) -> None:
            for (outgoing, tag, _, leaves, device), join in zip(batch, joins, strict=True):
                tensors = (
                    [t.contiguous() for t in buffers.values.pop(tag)]
                    if outgoing
                    else [torch.empty(leaf.shape, dtype=leaf.dtype, device=device) for leaf in leaves]
                )
                posted = tensors if join is None else join(tensors)
                buffers.pending[tag] = posted if outgoing else tensors

        return post_all

    def wait(self, transfer: Transfer) -> Call:
        def take(buffers: Buffers) -> None:
            tensors = buffers.pending.pop(transfer.tag)
            if not transfer.outgoing:
                buffers.values[transfer.tag] = tuple(tensors)

        return take


class OnPaper(InProcess):
    """Stands for the ranks of a mesh, of which only sizes are known: steps are lowered, and never run.

    This process is the first of the mesh's data ranks and model ranks, and holds all ranks of its pipeline.
    A mesh of torch's backend ``fake`` has no processes, and as many ranks as one likes::

        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8 * 16)
        mesh = torch.distributed.init_device_mesh("cpu", (8, 16), mesh_dim_names=("pp", "dp"))
        transport = ppfunc.OnPaper(mesh=mesh, axes=ppfunc.Axes("pp", data="dp"), shard="params")

    Args:
        mesh, axes, shard: arguments as of :class:`P2P`.

    Raises:
        TypeError, ValueError: as :class:`P2P`.
    """

    @naming_arguments
    def __init__(self, *, mesh: DeviceMesh, axes: Axes | None = None, shard: ShardWhat = "none") -> None:
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh: got {mesh!r}, expected a DeviceMesh, such as init_device_mesh makes")
        self.mesh, self.axes, self.shard = mesh, axes or Axes(), shard
        require_shardable(self.axes, shard)
        self._grid = grid_of(mesh, self.axes, int(mesh.mesh.flatten()[0]))

    def __repr__(self) -> str:
        return f"OnPaper(mesh={self.mesh!r}, axes={self.axes!r}, shard={self.shard!r})"

    def local_ranks(self, ranks: int) -> tuple[int, ...]:
        if ranks != len(self._grid.pipeline):
            raise ValueError(
                f"got a schedule of {ranks} ranks, the axis {self.axes.pipe!r} of the mesh has"
                f" {len(self._grid.pipeline)}; build the schedule for that many, or make another mesh"
            )
        return super().local_ranks(ranks)

    def collective(self, among: Among) -> Collective:
        if among == "world":
            return CollectiveOnPaper(self._grid.size)
        axes = tuple(axis for axis in among if isinstance(axis, str))
        return CollectiveOnPaper(len(self._grid.along(axes)) if axes else 1)  # all of the pipeline are here

    def ready(self, layouts: LaidOut) -> None:
        raise RuntimeError(
            "got a step to run on a transport that is on paper, whose ranks have no processes; call lower()"
            " for its text, memory and cost, or take ppfunc.P2P(mesh=mesh, axes=axes) in every process"
        )
