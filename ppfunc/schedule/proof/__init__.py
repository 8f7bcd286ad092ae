"""Prove schedules, in linear time, and time them.

`structure`, `order` and `queues` each refuse schedules that are wrong in one way; `certificate` holds what
they and the proofs of states have found; `timeline` is a schedule with times, simulated or measured.
"""
