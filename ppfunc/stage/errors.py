"""Name the stage, the reason and the mend where a stage cannot be served as it is written."""

import sys
import traceback
import warnings

from .places import is_of_a_library, line_of


class StageError(RuntimeError):
    """Raised for a stage that an engine cannot serve.

    Args:
        stage: its name.
        reason: the fault: got and expected.
        instead: the mend; empty if the reason says enough.
    """

    def __init__(self, stage: str, reason: str, instead: str) -> None:
        super().__init__(f"{stage}: {reason.rstrip('.')}." + (f" Instead: {instead}." if instead else ""))
        self.stage, self.reason, self.instead = stage, reason, instead

    def __reduce__(self) -> "tuple[type[StageError], tuple[str, str, str]]":
        return type(self), (self.stage, self.reason, self.instead)


def raised(error: BaseException) -> str:
    """Describe an error: its type, the user's line, its text and its notes."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    text = str(error)
    if "Autograd not support dtype" in text:  # torch's words for integers beside a tensor with a gradient
        notes += " (an operator on floating numbers was given integers; convert them, as x.float() does)"
    return f"it raised {type(error).__name__}{line_of(error)}: {text.rstrip('.')}{notes}"


def first_line(error: BaseException) -> str:
    """Write the class of an error, and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def by_dtensor(error: BaseException) -> bool:
    """Tell whether torch.func has refused one of DTensor's own Functions, which are of the old style."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return "setup_context" in str(error) and any(
        name.startswith("torch.distributed.tensor") for name in modules
    )


def warn(text: str) -> None:
    """Warn at the innermost line that runs now and is neither of torch nor of Python nor of this library."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and is_of_a_library(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
