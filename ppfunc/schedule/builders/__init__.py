"""Build schedules: pure functions ``(ranks, microbatches, ...) -> Schedule``."""

from collections.abc import Callable

from ..schedule import Schedule
from .bidirectional import chimera as chimera, dualpipe as dualpipe, dualpipev as dualpipev
from .deepspeed import (
    data_parallel as data_parallel,
    deepspeed_inference as deepspeed_inference,
    deepspeed_train as deepspeed_train,
)
from .interleaved import interleaved_1f1b, interleaved_zb, looped_bfs
from .one_stage import gpipe, inference, one_f_one_b, zb_h1, zb_h2
from .v_shape import v_half, v_min, zbv
from .zero_bubble import zbv_greedy, zero_bubble

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
    "deepspeed_train": deepspeed_train,
    "deepspeed_inference": deepspeed_inference,
}
