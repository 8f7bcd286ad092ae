"""Share the gradients of the inputs among the processes where chains begin, at the end of a program."""

from collections.abc import Iterator

from .buffers import Buffers, Tag
from .calls import Origin, PlacedCall, post_and_collect
from .lowered import BATCH, LoweredStep
from .transport import DataTransport, Transfer


def share_input_gradients(lowered: LoweredStep, data: DataTransport) -> Iterator[PlacedCall]:
    """Exchange gradients of the inputs with the processes where other chains begin, so that each has those of the whole batch."""
    schedule, home = lowered.schedule, lowered.schedule.placement
    firsts = {chain.stages[0]: chain.microbatches for chain in schedule.chains}
    here = [stage for stage in firsts if home[stage] in lowered.ranks]
    if "input_grads" not in lowered.spec.wants or len(here) in (0, len(firsts)):
        return
    moved: dict[Tag, Tag] = {}  # by message, the gradient that it carries
    batch: list[Transfer] = []
    wanted = [tuple(leaf for leaf in s.with_grad().leaves if leaf.grad) for s in lowered.form.inputs or ()]
    for own, other in ((own, other) for own in here for other in firsts if other not in here):
        for m in (m for stage in (own, other) for m in firsts[stage] if wanted[m]):
            outgoing = m in firsts[own]
            tag = Tag("R", own, other, m) if outgoing else Tag("R", other, own, m)
            moved[tag] = Tag("B", tag.source, BATCH, m)
            batch.append(Transfer(outgoing, tag, home[other], wanted[m], lowered.form.devices[schedule.model_stages[own]]))

    def publish(buffers: Buffers) -> None:
        buffers.values.update((t.tag, buffers.values[moved[t.tag]]) for t in batch if t.outgoing)

    def collect(buffers: Buffers) -> None:
        buffers.values.update((moved[t.tag], buffers.values.pop(t.tag)) for t in batch if not t.outgoing)

    rank = home[here[0]]
    place = Origin(rank, len(schedule.programs[rank]) - 1, schedule.programs[rank][-1][-1])
    yield publish, place
    yield from post_and_collect(place, data, batch, collect)
