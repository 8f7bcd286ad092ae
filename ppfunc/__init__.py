"""ppfunc: pipeline parallelism for PyTorch with pure stages and schedules as values."""
