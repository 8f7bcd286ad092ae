"""Add skip connections to a schedule: values that travel further than to the next stage."""

import reprlib
from collections.abc import Collection
from dataclasses import replace

from ..instruction import Op
from ..proof.structure import require_schedule
from ..schedule import Schedule
from .rewrite import remove_communication


def with_skips(schedule: Schedule, skips: Collection[tuple[int, int]]) -> Schedule:
    """Add skip connections: ``Output.skips`` carries values from one stage to a later one.

    Args:
        schedule: any; its communication is placed anew if it has some.
        skips: ``(source stage, destination stage)`` of each, stages of the model, the source before the
            destination. The source returns ``Output(y, skips={destination: tree})``, the destination gets
            ``Received(x, {source: tree})`` in the place of ``x``. Replicas have the same ones.

    Raises:
        TypeError: not a list of pairs.
        ValueError: a stage does not exist, or the destination does not come after the source and its
            neighbour.

    >>> from ppfunc import gpipe
    >>> with_skips(gpipe(ranks=3, microbatches=2), [(0, 2)]).skips
    ((0, 2),)
    """
    require_schedule(schedule)
    if not isinstance(skips, Collection) or not all(
        isinstance(edge, tuple | list) and len(edge) == 2 for edge in skips
    ):
        raise TypeError(
            f"skips: got {reprlib.repr(skips)} of type {type(skips).__name__}, expected a list of pairs"
            " (source, destination)"
        )
    places = {schedule.model_stages[stage]: place for place, stage in enumerate(schedule.chains[0].stages)}
    for source, destination in skips:
        if not {source, destination} <= places.keys() or places[destination] < places[source] + 2:
            raise ValueError(
                f"skips: got {(source, destination)}, expected (source, destination), two stages of the model"
                " with another one between them"
            )
    edges = [(c.stages[places[a]], c.stages[places[b]]) for a, b in skips for c in schedule.chains]
    bare = remove_communication(schedule) if schedule.ops & {Op.SEND_F, Op.RECV_F} else schedule
    return replace(bare, skips=tuple(dict.fromkeys(edges)))
