"""ppfunc: pipeline parallelism for PyTorch with pure stages and schedules as values."""

from importlib import import_module
from typing import Any

# Loaded when first used, so that schedules can be studied without loading torch.
_HOMES = {
    "ppfunc.pipeline": ("evaluate", "microbatch", "value_and_grad", "with_skips"),
    "ppfunc.runtime": ("AgreementError", "Aux", "InProcess", "P2P", "PipelineError", "interleaved", "two_streams"),
    "ppfunc.stage": ("StageError", "eager", "functional", "graph", "split_sequential", "stage_from_module"),
    "ppfunc.stage.output": ("Output", "Received"),
    "ppfunc.stage.layers": ("stages_from_layers",),
    "ppfunc.stage.transforms": ("clipped_sum", "dual", "ensemble", "square_norms"),
    "ppfunc.training": ("Optimizer", "adamw", "sgd"),
    "ppfunc.transforms": ("gnvp", "hvp", "jvp", "per_sample_grad"),
    "ppfunc.schedule": (
        "Certificate",
        "Costs",
        "Instruction",
        "Op",
        "Schedule",
        "ScheduleError",
        "check",
        "data_parallel",
        "deepspeed_inference",
        "deepspeed_train",
        "dualpipe",
        "dualpipev",
        "gpipe",
        "inference",
        "interleaved_one_f_one_b",
        "interleaved_zero_bubble",
        "looped_bfs",
        "one_f_one_b",
        "simulate",
        "v_half",
        "v_min",
        "zb_h1",
        "zb_h2",
        "zbv",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'ppfunc' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
