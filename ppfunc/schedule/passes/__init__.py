"""Passes: pure functions from schedules to schedules, one file each."""

from .allocate_slots import allocate_slots
from .append_tail import append_tail
from .forward_only import forward_only
from .insert_loads import insert_loads
from .insert_offloads import insert_offloads
from .linearize import linearize
from .merge_backward import merge_backward
from .place_communication import place_communication
from .remove_communication import remove_communication
from .remove_slots import remove_slots
from .remove_tail import remove_tail
from .send_completion import send_completion
from .split_backward import split_backward

__all__ = [
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
    "remove_tail",
    "send_completion",
    "split_backward",
]
