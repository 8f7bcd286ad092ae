"""Build schedules: pure functions ``(ranks, microbatches, ...) -> Schedule``, found by their names."""

import re
from collections.abc import Callable

from ppfunc._checks import require_type, suggestion

from ..schedule import Schedule
from .patterns import (
    chimera as chimera,
    data_parallel as data_parallel,
    decode as decode,
    deepspeed_inference as deepspeed_inference,
    deepspeed_train as deepspeed_train,
    dualpipe as dualpipe,
    dualpipev as dualpipev,
    gpipe as gpipe,
    inference as inference,
    interleaved_1f1b as interleaved_1f1b,
    interleaved_zb as interleaved_zb,
    looped_bfs as looped_bfs,
    one_f_one_b as one_f_one_b,
    seq1f1b as seq1f1b,
    seq_zb as seq_zb,
    v_half as v_half,
    v_min as v_min,
    zb_h1 as zb_h1,
    zb_h2 as zb_h2,
    zbv as zbv,
)
from .zero_bubble import zbv_greedy as zbv_greedy, zero_bubble as zero_bubble

BUILDERS: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "inference": inference,
    "data_parallel": data_parallel,
    "interleaved_1f1b": interleaved_1f1b,
    "looped_bfs": looped_bfs,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "interleaved_zb": interleaved_zb,
    "zero_bubble": zero_bubble,
    "zbv": zbv,
    "zbv_greedy": zbv_greedy,
    "v_half": v_half,
    "v_min": v_min,
    "chimera": chimera,
    "dualpipe": dualpipe,
    "dualpipev": dualpipev,
    "seq1f1b": seq1f1b,
    "seq_zb": seq_zb,
    "decode": decode,
    "deepspeed_train": deepspeed_train,
    "deepspeed_inference": deepspeed_inference,
}
"""The builders of schedules by name, such as ``"1f1b"``; :func:`find_builder` takes other spellings too."""
# Names of torch.distributed.pipelining that are not those of our builders in another spelling.
_NAMES_IN_TORCH = {"interleavedzerobubble": "interleaved_zb", "zbvzerobubble": "zbv"}


def find_builder(name: str) -> Callable[..., Schedule]:
    """Find a builder by its name in any spelling.

    A schedule has the name of its function, but for ``"1f1b"``, which is :func:`one_f_one_b`: names in Python
    begin with a letter. ``"Schedule1F1B"`` of torch is the same builder.

    Raises:
        ValueError: for an unknown name, with the known ones and the most similar.
    """
    require_type("name", name, str, "that of a schedule, such as '1f1b'")
    spellings = {_plain(builder.__name__): builder for builder in BUILDERS.values()}
    spellings |= {_plain(known): builder for known, builder in BUILDERS.items()}
    spellings |= {theirs: BUILDERS[ours] for theirs, ours in _NAMES_IN_TORCH.items()}
    plain = _plain(name)
    if plain not in spellings:
        # The first builder whose name begins so, else the most similar.
        begun = next((known for known in BUILDERS if known.startswith(name.lower())), name.lower())
        raise ValueError(
            f"unknown schedule {name!r}: expected one of {', '.join(BUILDERS)}{suggestion(begun, BUILDERS)}"
        )
    return spellings[plain]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("schedule")
