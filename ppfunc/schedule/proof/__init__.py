"""Prove schedules, in linear time, and time them.

Each of four modules refuses schedules that are wrong in one way: `structure`, `order`, `states`, `queues`.
`certificate` is what they have found together; `earliest` finds when each instruction can begin, and
`timeline` is a schedule with those times, or with measured ones.
"""
