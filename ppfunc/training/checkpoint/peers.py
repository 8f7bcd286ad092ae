"""Let the ranks that save or load together exchange small values: JSON, over links of their own."""

import json
import weakref
from collections.abc import Callable
from typing import Any, Self

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ppfunc.runtime.control.control import Control
from ppfunc.runtime.control.links import Rendezvous, SocketLinks
from ppfunc.runtime.values.errors import Failure, PipelineError
from ppfunc.stage.process import hold_interrupts, this_thread


class CheckpointError(RuntimeError):
    """Raised for a damaged or incomplete checkpoint, or if the ranks that save or load cannot go on."""


class RankError(CheckpointError):
    """Raised if another rank is gone, or failed with an error of its own: no checkpoint helps."""


Group = dist.ProcessGroup | DeviceMesh | None
"""Ranks that save or load together.

By default all of ``torch.distributed``, or this process where that is not initialised.
"""

_KINDS = {
    kind.__name__: kind
    for kind in (CheckpointError, FileExistsError, FileNotFoundError, ValueError, TypeError)
}


class Peers:
    """Connect the ranks that save or load together, each at the same point of its program.

    A context manager that ends its connections: peers that still wait raise.

    Raises:
        ValueError: this process is none of the ranks.
        RuntimeError: a step runs in this thread, which a handler of a signal has interrupted.
        RankError: another rank is gone, late, or has failed.
    """

    def __init__(self, group: Group) -> None:
        ranks, rank = _ranks(group)
        if rank not in ranks:
            raise ValueError(
                f"group: got a group of the ranks {ranks}, this process is rank {rank}; call it on the ranks"
                " of the group only"
            )
        self.rank, self.size = ranks.index(rank), len(ranks)
        self._links: SocketLinks | None = None
        if self.size > 1 and this_thread.held is not None:
            raise RuntimeError(
                "got a call of several ranks within a step, which other ranks may have ended; let the handler"
                " of a signal set a flag, and save after the step"
            )
        if self.size > 1:
            world: Any = dist.group.WORLD
            try:
                with hold_interrupts():
                    rendezvous = Rendezvous("ppfunc/checkpoints", world, None, ranks)
                    with rendezvous.opening():
                        self._links = SocketLinks(rendezvous)
                        weakref.finalize(self, self._links.close)
                        self._control = Control(self._links)
            except PipelineError as error:
                raise _rank_error(error) from error

    def all_gather(self, value: Any) -> list[Any]:
        """Gather the values of all ranks, in their order; JSON."""
        if self._links is None:
            return [value]
        try:
            self._links.check()
            return [json.loads(text) for text in self._control.all_gather(json.dumps(value))]
        except BaseException as cause:
            error = self._control.fail(Failure(self.rank, None, None, cause))
            if isinstance(error, PipelineError):
                raise _rank_error(error) from None
            raise error from None

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """Run ``work`` on every rank. If it raises on one, all raise, with its kind and the rank.

        Of several errors, one that is no plain CheckpointError is raised: then no rank tries an earlier
        checkpoint, else all do.

        Returns:
            The result of every rank; JSON.

        Raises:
            RankError: ``work`` has raised on another rank, of a kind that is only known there.
        """
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:
            failure = error
        answers = self.all_gather([result, failure and [type(failure).__name__, str(failure)[:2000]]])
        failures = [(rank, *raised) for rank, (_, raised) in enumerate(answers) if raised]
        for rank, name, text in sorted(failures, key=lambda raised: raised[1] == CheckpointError.__name__):
            if failure is not None and (
                name == CheckpointError.__name__ or type(failure) is not CheckpointError
            ):
                raise failure
            kind = _KINDS.get(name)
            raise (kind or RankError)(f"rank {rank}: {'' if kind else name + ': '}{text}") from failure
        return [result for result, _ in answers]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._links is not None:
            self._links.leave()


def _rank_error(error: PipelineError) -> RankError:
    how = "is gone" if error.gone else "has failed"
    return RankError(f"rank {error.rank} {how}: {error.reason}")


def _ranks(group: Group) -> tuple[list[int], int]:
    if isinstance(group, DeviceMesh):
        return group.mesh.flatten().tolist(), dist.get_rank()
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group: got {type(group).__name__}, expected a ProcessGroup, a DeviceMesh, or None for all ranks"
        )
    if group is None and not dist.is_initialized():
        return [0], 0
    return dist.get_process_group_ranks(group), dist.get_rank()
