"""Keep the ranks of a pipeline together: a step begins, ends or fails on all of them, along a binary tree."""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh

from ppfunc._checks import not_copied
from ppfunc.stage.device import download, upload
from ppfunc.stage.process import act_on_interrupts, hold_interrupts, keep_holding

from ..lowering.comparison import (
    require_alike,
    require_same_changes,
    require_same_modes,
    require_same_terms,
)
from ..ports.protocols import (
    Axes,
    Grid,
    LossPart,
    Mode,
    ShardWhat,
    form_of_sum,
    of_text,
    sum_texts,
    to_text,
)
from ..values.arguments import LaidOut
from ..values.buffers import Compared
from ..values.errors import (
    CLOSED,
    OTHER,
    AgreementError,
    Failure,
    FailureRecord,
    LinkError,
    PipelineError,
    StepRunning,
)
from .tree import BEGIN, END, TEXT, Links, TreeMessages

_BEGINS = " on the step that begins"


class Control:
    """Implements the control half of a transport with one rank in each process (or thread), over its links.

    Steps begin down a tree, and end up and down again, with the losses on the way. Where several pipelines
    train together, the ranks of all of them begin, end and fail a step together; those that run the same
    batch also agree on it.

    Args:
        links: carry the messages; closed with it.
        grid: ranks of each pipeline; by default all ranks make one pipeline.
    """

    has_peers = True
    mesh: DeviceMesh | None = None
    axes = Axes()
    shard: ShardWhat = "none"

    def __init__(self, links: Links, grid: Grid | None = None) -> None:
        everyone = tuple(range(links.size))
        alone = Grid((everyone,), links.size, links.rank, axes=("pp",), sizes=(links.size,))
        self.links, self.grid = links, grid or alone
        self.pipeline = self.grid.pipeline
        self.rank, self.size = self.pipeline.index(links.rank), len(self.pipeline)  # of the pipeline
        self.ended = 0
        self._world = TreeMessages(links, everyone)
        self._replica = TreeMessages(links, [rank for ranks in self.grid.pipelines for rank in ranks])
        self._pipeline = TreeMessages(links, self.pipeline)
        self._together = TreeMessages(links, self.grid.together) if len(self.grid.together) > 1 else None
        self.has_other_pipelines = self.size < links.size
        self.mixes_batches, self.compares_layouts = self.grid.mixes_batches, self._together is not None
        self._running, self._closed = threading.Lock(), False
        self._step_count = 0  # step functions
        self._executing = False  # whether peers may wait for this rank in a collective of a stage
        self._unusable: str | None = None  # why, and what to do

    @property
    def device(self) -> torch.device:
        """Return the device on which losses are summed and returned."""
        return torch.device("cpu")

    @property
    def generation(self) -> int:
        return self.links.generation

    def local_ranks(self, ranks: int) -> tuple[int, ...]:
        if ranks != self.size:
            raise ValueError(
                f"the schedule is for {ranks} ranks, the transport has {self.size}; "
                f"build the schedule with ranks={self.size}, or start {ranks} processes"
            )
        return (self.rank,)

    def register_step(self) -> int:
        self._step_count += 1
        return self._step_count

    @contextmanager
    def making_step(self) -> Iterator[None]:
        count = self._step_count
        try:
            yield
        except Exception as cause:
            failure = Failure(self.rank, None, None, cause)
            # The peers have lost a step by it, this rank has not: the batches would not be the same.
            self._unusable = (
                f"a step function could not be made ({failure.reason}); mend that, and make a new P2P() on"
                " every rank"
            )
            self.fail(failure)
            raise
        except BaseException:  # an interrupt: the peers have theirs
            self._step_count = count
            raise

    def hold_interrupts(self) -> hold_interrupts:
        return hold_interrupts()

    def tear_down(self) -> None:
        """Abort the data communicators that peers may block on. Called after a failure is published."""

    # -- agreement -------------------------------------------------------------------------

    def begin(self, call: str, key: str | None, source: int, common: str = "") -> str:
        if not self._running.acquire(blocking=False):
            raise StepRunning(CLOSED if self._closed else OTHER)
        if self._unusable is not None:
            raise RuntimeError(self._unusable)
        if key is None and self.rank == source:
            raise ValueError(
                f"inputs: got None on rank {self.rank}, which tells the others their shapes; give it the"
                " inputs"
            )
        self.links.check()
        common = f"{common}; steps ended: {self.ended}" if common else f"steps ended: {self.ended}"
        first = self.grid.pipelines[0][source]  # of the ranks that are given the batch, the one that counts
        tree = self._replica
        if tree.size < self._world.size:
            self._pass_down(self._world, common)
            common = ""
        mine = "; ".join(filter(None, (call, f"shapes from rank {first}", common)))
        shapes = self._pass_down(tree, mine, key if first == tree.top else None)
        if shapes is None:
            shapes = tree.gather_texts(key if key is not None and self.links.rank == first else "")[first]
        if key is not None:
            require_same_terms(key, shapes, self.links.rank, tree.top, _BEGINS)
        if self._together is not None and self.mixes_batches:
            self._pass_down(self._together, shapes)
        return shapes

    def ready(self, layouts: LaidOut) -> None:
        tree = self._together
        if tree is not None and len(set(tree.gather_texts(layouts.digest).values())) > 1:
            texts = tree.gather_texts(json.dumps(layouts.leaves))
            by_rank = {rank: json.loads(text) for rank, text in sorted(texts.items())}
            require_alike(by_rank, "the ranks of one stage")
        self._executing = True

    def rest(self) -> None:
        self._executing = False

    def _pass_down(self, tree: TreeMessages, mine: str, shapes: str | None = None) -> str | None:
        """Compare the call with the top's call; pass it down with the shapes, and return the shapes."""
        begun = json.dumps([mine, shapes])
        if tree.parent is not None:
            begun = tree.recv(tree.parent, BEGIN)
            call, shapes = json.loads(begun)
            require_same_terms(mine, call, self.links.rank, tree.top, _BEGINS)
        tree.send_down(BEGIN, begun)
        return shapes

    def all_gather(self, text: str) -> list[str]:
        texts = self.gather(text, (self.axes.pipe,))
        return [texts[rank] for rank in self.pipeline]

    def require_same(self, facts: str, axes: Sequence[str] | None = None) -> None:
        for rank, theirs in sorted(self.gather(facts, axes).items()):
            require_same_terms(facts, theirs, self.links.rank, rank)

    def gather(self, text: str, axes: Sequence[str] | None = None) -> dict[int, str]:
        tree = self._world if axes is None else TreeMessages(self.links, self.grid.along(axes))
        with self.hold_interrupts():
            return tree.gather_texts(text)

    def send_text(self, peer: int, text: str) -> None:
        with self.hold_interrupts():
            self.links.send(self.pipeline[peer], TEXT, text.encode(errors="surrogatepass"))

    def recv_text(self, peer: int) -> str:
        with self.hold_interrupts():
            return self.links.recv(self.pipeline[peer], TEXT).decode(errors="surrogatepass")

    # -- the end of a step -----------------------------------------------------------------

    def end(
        self,
        losses: Mapping[int, torch.Tensor],
        parts: Mapping[int, LossPart],
        mode: Mode = "mixed",
        compared: Sequence[Compared] = (),
        changed: Mapping[str, str] | None = None,
    ) -> torch.Tensor | None:
        losses = {stage: download(loss) for stage, loss in losses.items()}  # there once the device is done
        compared = [each._replace(values=download(each.values)) for each in compared]
        self.synchronize()
        for values, require in compared:
            require(values)
        here = {str(n): to_text(losses[n]) for n, part in parts.items() if part.rank == self.rank}
        total, add = "", partial(sum_texts, parts=parts)
        if parts and self.has_other_pipelines:
            total, here = self._pipeline.share(END, self._pipeline.collect(END, here), add), {}

        def conclude(ends: list[Any]) -> str:
            require_same_modes({rank: mode for rank, mode, *_ in ends})
            require_same_changes({rank: changed or {} for rank, _, changed, _ in ends})
            return add(losses for *_, losses in ends) if parts and not self.has_other_pipelines else ""

        ends = self._world.collect(END, (self.links.rank, mode, changed, here))
        act_on_interrupts()  # those that have come fail the step, others wait for its end
        keep_holding()  # the step may have ended on some ranks already
        total = self._world.share(END, ends, conclude, self.ended) or total
        self._executing = False
        self._running.release()
        if self._closed:  # by another thread, which has left this to the step
            self.tear_down()
        if not parts:
            return None
        return upload(of_text(total, *form_of_sum(parts)), self.device)

    def synchronize(self) -> None:
        """Wait until the device has done the work of the step; the CPU has."""

    # -- failures --------------------------------------------------------------------------

    def fail(self, failure: Failure) -> BaseException:
        """Publish a failure, begin the next generation, and return the error to raise.

        Returns:
            The cause itself if it arose here outside the program, or if no step can be run any more; else the
            error of the first failure, with its rank and place.
        """
        cause, rank = failure.cause, self.links.rank
        failure, refused = failure._replace(rank=self.pipeline[failure.rank]), self._unusable is not None
        if isinstance(cause, StepRunning) and not cause.refused:
            cause.refused = True
            return cause
        with self.hold_interrupts():
            keep_holding()
            try:
                mine = FailureRecord.of(failure, rank, self.links.suspect)
                first = FailureRecord.read(self.links.publish(mine.write()))
            finally:
                try:
                    self.tear_down()
                finally:
                    self._executing = False
                    if self._running.locked():
                        self._running.release()
        arose_here = first == mine and failure.instruction is None and not isinstance(cause, LinkError)
        if arose_here or refused:
            return cause
        return first.error(rank)

    def close(self) -> None:
        """End all connections: peers that still use this transport raise. Idempotent."""
        with self.hold_interrupts():
            self._closed = True
            self.links.close()

    __reduce__ = not_copied("a transport", "make one in each process, such as pp.P2P()")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close. Publish an error that ends the block on this rank outside a step."""
        told = isinstance(error, PipelineError | AgreementError)  # by the step that raised it
        try:
            if error is not None and not (told or self._closed or isinstance(error, GeneratorExit)):
                self.fail(Failure(self.rank, None, None, error))
        finally:
            self.close()
