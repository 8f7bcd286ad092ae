"""Passes: pure functions from schedules to schedules, one file each."""

from .linearize import linearize
from .place_communication import place_communication

__all__ = ["linearize", "place_communication"]
