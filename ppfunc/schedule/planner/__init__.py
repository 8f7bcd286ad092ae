"""Plan schedules: search for the shortest that fits in memory.

`overview` compares schedules, each with its bound.
"""
