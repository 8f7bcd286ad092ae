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
from .costs import Costs
from .errors import ScheduleError
from .instruction import Instruction, Op, overlap, parts_of
from .passes import linearize, place_communication
from .schedule import Chain, Program, Schedule, Step, elementary, single_chain
from .simulate import Timeline, measure, peak_activations, simulate

__all__ = [
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
    "measure",
    "one_f_one_b",
    "overlap",
    "parts_of",
    "peak_activations",
    "place_communication",
    "simulate",
    "single_chain",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zbv",
]
