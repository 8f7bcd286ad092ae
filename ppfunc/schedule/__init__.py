r"""Schedules: instructions, builders, lowering passes, proof, simulation, formats.

>>> from ppfunc.schedule import Costs, check, one_f_one_b, simulate, to_csv
>>> schedule = one_f_one_b(ranks=2, microbatches=3)
>>> print(schedule)
rank 0  0F0 0F1  .  0B0 0F2 0B1  .  0B2
rank 1   .  1F0 1B0 1F1 1B1 1F2 1B2  .
>>> check(schedule).peak_activations
(2, 1)
>>> simulate(schedule, Costs(forward=1, backward=2)).makespan
12
>>> to_csv(schedule)
'0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n'
"""

from importlib import import_module
from typing import Any

from .bounds import lower_bound
from .builders import (
    BUILDERS,
    chimera,
    data_parallel,
    deepspeed_inference,
    deepspeed_train,
    dualpipe,
    dualpipev,
    gpipe,
    inference,
    interleaved_one_f_one_b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zbv,
    zero_bubble,
)
from .check import Certificate, check, is_step_atomic
from .costs import Costs
from .errors import ScheduleError
from .instruction import Instruction, Op, overlap, parts_of
from .passes import (
    allocate_slots,
    append_tail,
    forward_only,
    insert_loads,
    insert_offloads,
    linearize,
    merge_backward,
    place_communication,
    remove_communication,
    remove_slots,
    split_backward,
)
from .schedule import Chain, Program, Schedule, Step, elementary, single_chain
from .simulate import Timeline, measure, peak_activations, simulate

# Loaded when first used, because most uses of schedules read no file and draw no picture.
_FORMATS = (
    "FormatError",
    "compute_only",
    "from_csv",
    "from_json",
    "read_schedule",
    "to_csv",
    "to_grid",
    "to_json",
    "to_steps",
    "to_svg",
    "to_trace",
    "write_csv",
)

__all__ = [  # noqa: PLE0604
    *_FORMATS,
    "BUILDERS",
    "Certificate",
    "Chain",
    "Costs",
    "Instruction",
    "Op",
    "Program",
    "Schedule",
    "ScheduleError",
    "Step",
    "Timeline",
    "allocate_slots",
    "append_tail",
    "check",
    "chimera",
    "data_parallel",
    "deepspeed_inference",
    "deepspeed_train",
    "dualpipe",
    "dualpipev",
    "elementary",
    "forward_only",
    "gpipe",
    "inference",
    "insert_loads",
    "insert_offloads",
    "interleaved_one_f_one_b",
    "interleaved_zero_bubble",
    "is_step_atomic",
    "linearize",
    "looped_bfs",
    "lower_bound",
    "measure",
    "merge_backward",
    "one_f_one_b",
    "overlap",
    "parts_of",
    "peak_activations",
    "place_communication",
    "remove_communication",
    "remove_slots",
    "simulate",
    "single_chain",
    "split_backward",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zbv",
    "zero_bubble",
]


def __getattr__(name: str) -> Any:
    if name in _FORMATS:
        return getattr(import_module(f"{__name__}.formats"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
