"""Schedules: instructions, builders, lowering passes, proof, simulation, formats."""

from .builders import (
    BUILDERS,
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
)
from .check import Certificate, check, is_step_atomic
from .errors import ScheduleError
from .instruction import Instruction, Op, overlap, parts_of
from .passes import linearize, place_communication
from .schedule import Chain, Program, Schedule, Step, elementary, single_chain

__all__ = [
    "BUILDERS",
    "Certificate",
    "Chain",
    "Instruction",
    "Op",
    "Program",
    "Schedule",
    "ScheduleError",
    "Step",
    "check",
    "data_parallel",
    "deepspeed_inference",
    "deepspeed_train",
    "dualpipe",
    "dualpipev",
    "elementary",
    "gpipe",
    "inference",
    "interleaved_one_f_one_b",
    "interleaved_zero_bubble",
    "is_step_atomic",
    "linearize",
    "looped_bfs",
    "one_f_one_b",
    "overlap",
    "parts_of",
    "place_communication",
    "single_chain",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zbv",
]
