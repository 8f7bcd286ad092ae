"""Rewrite schedules: pure functions from schedules to schedules, and questions about one that runs."""
