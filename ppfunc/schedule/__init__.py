r"""Schedules: instructions, builders, lowering passes, proof, simulation, formats.

>>> from ppfunc.schedule import Costs, check, one_f_one_b, simulate, to_csv, to_grid
>>> schedule = one_f_one_b(ranks=2, microbatches=3)
>>> print(schedule)
0F0 0F1 0B0 0F2 0B1 0B2
1F0 1B0 1F1 1B1 1F2 1B2
>>> print(to_grid(schedule), end="")
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

from .check import Certificate, check, is_step_atomic
from .costs import Costs
from .errors import ScheduleError
from .instruction import Instruction, Op, overlap, parts_of
from .schedule import Chain, Program, Schedule, Step, elementary, single_chain
from .simulate import Timeline, measure, peak_activations, simulate

# Loaded when first used, because no use of schedules needs all of it.
_ROOMS = {
    "bounds": ("lower_bound",),
    "builders": (
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
        "zero_bubble",
    ),
    "formats": (
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
    ),
    "passes": (
        "allocate_slots",
        "append_tail",
        "forward_only",
        "insert_loads",
        "insert_offloads",
        "linearize",
        "merge_backward",
        "place_communication",
        "remove_communication",
        "remove_slots",
        "send_completion",
        "split_backward",
    ),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [  # noqa: PLE0604
    *_ROOM_OF,
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
    "check",
    "elementary",
    "is_step_atomic",
    "measure",
    "overlap",
    "parts_of",
    "peak_activations",
    "simulate",
    "single_chain",
]


def __getattr__(name: str) -> Any:
    if name in _ROOM_OF:
        return getattr(import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
