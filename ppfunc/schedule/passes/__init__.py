"""Passes: pure functions from schedules to schedules, one file each."""

from .forward_only import forward_only
from .linearize import linearize
from .place_communication import place_communication

__all__ = ["forward_only", "linearize", "place_communication"]
