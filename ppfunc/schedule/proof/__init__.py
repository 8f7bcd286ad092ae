"""The rooms of the proof: each refuses schedules that are wrong in one way, in linear time."""
