"""Passes: pure functions from schedules to schedules, and two questions about a schedule that runs."""
