"""Rewrite schedules: pure functions from schedules to schedules, and two questions about one that runs."""
