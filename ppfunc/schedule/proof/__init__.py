"""Prove schedules: each module refuses those that are wrong in one way, in linear time."""
