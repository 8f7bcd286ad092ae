"""The builders of schedules: one pure function ``(ranks, microbatches, ...) -> Schedule`` each."""

from __future__ import annotations

from collections.abc import Callable

from ..schedule import Schedule
from .chimera import chimera
from .data_parallel import data_parallel
from .deepspeed_inference import deepspeed_inference
from .deepspeed_train import deepspeed_train
from .dualpipe import dualpipe
from .dualpipev import dualpipev
from .gpipe import gpipe
from .inference import inference
from .interleaved_one_f_one_b import interleaved_one_f_one_b
from .interleaved_zero_bubble import interleaved_zero_bubble
from .looped_bfs import looped_bfs
from .one_f_one_b import one_f_one_b
from .v_half import v_half
from .v_min import v_min
from .zb_h1 import zb_h1
from .zb_h2 import zb_h2
from .zbv import zbv
from .zbv_greedy import zbv_greedy
from .zero_bubble import zero_bubble

# Without chimera, which is there for comparison.
BUILDERS: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "inference": inference,
    "data_parallel": data_parallel,
    "interleaved_1f1b": interleaved_one_f_one_b,
    "looped_bfs": looped_bfs,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "interleaved_zb": interleaved_zero_bubble,
    "zero_bubble": zero_bubble,
    "zbv": zbv,
    "zbv_greedy": zbv_greedy,
    "v_half": v_half,
    "v_min": v_min,
    "dualpipe": dualpipe,
    "dualpipev": dualpipev,
    "deepspeed_train": deepspeed_train,
    "deepspeed_inference": deepspeed_inference,
}

__all__ = [
    "BUILDERS",
    "chimera",
    "data_parallel",
    "deepspeed_inference",
    "deepspeed_train",
    "dualpipe",
    "dualpipev",
    "gpipe",
    "inference",
    "interleaved_one_f_one_b",
    "interleaved_zero_bubble",
    "looped_bfs",
    "one_f_one_b",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zbv",
    "zbv_greedy",
    "zero_bubble",
]
