"""Name the stage, the reason and the mend where a stage cannot be served as it is written, and its place: the
line and the module of a call in the user's code, also in a program that was traced.
"""

import dis
import sys
import traceback
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

TRACED_LINES = "ppfunc_traced_lines"
"""A global name of programs that were traced: by line, the place in the user's code."""

TRACED_MODULES = "ppfunc_traced_modules"
"""A global name of programs that were traced: by line, the place in the user's modules."""

Names = dict[int, tuple[torch.nn.Module, dict[int, str]]]
"""An outermost module, by identity, with the names of all modules in it, by identity."""
CALLS_MODULE = torch.nn.Module._call_impl.__code__
"""The code that calls the ``forward`` of a module."""

_LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parents[1])
_LAYERS = Path(torch.__file__).parent / "nn" / "modules"
_PYTHON = Path(traceback.__file__).parent


class StageError(RuntimeError):
    """Raised for a stage that an engine cannot serve.

    Args:
        stage: the name of the stage.
        reason: the fault: got and expected.
        instead: the mend; empty if the reason says enough.
    """

    def __init__(self, stage: str, reason: str, instead: str) -> None:
        super().__init__(f"{stage}: {reason.rstrip('.')}." + (f" Instead: {instead}." if instead else ""))
        self.stage, self.reason, self.instead = stage, reason, instead

    def __reduce__(self) -> "tuple[type[StageError], tuple[str, str, str]]":
        return type(self), (self.stage, self.reason, self.instead)


def other_engine(name: str) -> str:
    """Advise to differentiate a stage by the engine of this name."""
    return f"use the {name} engine, for this stage alone by a list, engine=[graph, graph, {name}]"


def raised(error: BaseException) -> str:
    """Describe an error: its type, the user's line, its text and its notes."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"it raised {type(error).__name__}{line_of(error)}: {str(error).rstrip('.')}{notes}{meant(error)}"


_DTYPES = (
    "cast the batch to the dtype of the parameters, x.to(dtype), or have a trainer cast both, by"
    " precision=ppfunc.Precision(compute=dtype)"
)
_MEANT = {
    "Autograd not support dtype": "an operator on floating numbers was given integers; convert them, as"
    " x.float() does",  # beside a tensor with a gradient
    "the same dtype": _DTYPES,
    "should be the same": _DTYPES,
}
"""By words of torch: what is to be done."""


def meant(error: BaseException) -> str:
    """Explain words of torch in parentheses; an empty text for other words."""
    return "".join(f" ({mend})" for words, mend in _MEANT.items() if words in str(error))


def first_line(error: BaseException) -> str:
    """Write the class of an error, and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def refuse_own(error: BaseException, stage: str) -> None:
    """Raise StageError for an error of the user's own code in a later call: it is no refusal of an operator.

    Operators refuse by RuntimeError or TypeError, without a statement ``raise`` of the user's. An error that
    is raised while another one is handled counts as that.
    """
    first = error
    while (before := first.__context__) is not None and before.__traceback__ is not None:
        first = before
    trace: Any = first.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    raises = code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    if not is_of_a_library(code.co_filename) and (raises or not isinstance(first, RuntimeError | TypeError)):
        raise StageError(
            stage, f"it ran before, and then raised {first_line(error)}{line_of(error)}", ""
        ) from error


def by_dtensor(error: BaseException) -> bool:
    """Tell whether torch.func has refused an own Function of DTensor, all of which are of the old style."""
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


# -- places in the user's code


def line_of(error: BaseException) -> str:
    """Find the innermost line of the user, as ``" at file:line"``; else that line of a layer of torch.

    Of a program that was traced, it is the line that was traced.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    if traced := [
        place for frame, line in frames if (place := frame.f_globals.get(TRACED_LINES, {}).get(line))
    ]:
        return f" at {traced[-1]}"
    files = [(frame.f_code.co_filename, line) for frame, line in frames]
    candidates = [place for place in files if not is_of_a_library(place[0])] or [
        place for place in files if _is_layer(place[0])
    ]
    return f" at {candidates[-1][0]}:{candidates[-1][1]}" if candidates else ""


def place_of_call(end: str = "") -> str:
    """Find the user's line that runs now, as ``", called at file:line"``; empty above the file ``end``.

    Of a program that was traced, it is the line that was traced.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_of_a_library(frame.f_code.co_filename):
        if traced := frame.f_globals.get(TRACED_LINES, {}).get(frame.f_lineno):
            return f", called at {traced}"
        if frame.f_code.co_filename == end:
            return ""
        frame = frame.f_back
    return "" if frame is None else f", called at {frame.f_code.co_filename}:{frame.f_lineno}"


class ModulePlace(NamedTuple):
    """Describe a place in the calls of modules.

    Args:
        name: the name of the innermost module, within the outermost module; empty for that itself.
        names: the names of all modules within the outermost module, by identity.
    """

    name: str
    names: Mapping[int, str]


def module_of_call(end: str, known: Names) -> ModulePlace | None:
    """Find the module whose call runs now below the file ``end``.

    Of a program that was traced, it is the module that was traced.

    Args:
        known: names that were asked for before; new ones are added.
    """
    inside: list[torch.nn.Module] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != end:
        if frame.f_code is CALLS_MODULE:
            inside.append(frame.f_locals["self"])
        elif traced := frame.f_globals.get(TRACED_MODULES, {}).get(frame.f_lineno):
            return traced
        frame = frame.f_back
    if not inside:
        return None
    outermost = inside[-1]
    if id(outermost) not in known:
        lists = torch.nn.ModuleList, torch.nn.ModuleDict  # which nobody calls
        named = {id(m): name for name, m in outermost.named_modules() if not isinstance(m, lists)}
        known[id(outermost)] = outermost, named
    names = known[id(outermost)][1]
    return ModulePlace(next(names[id(m)] for m in inside if id(m) in names), names)


@cache
def _is_layer(path: str) -> bool:
    """Tell whether a file defines layers of torch, rather than calls or contains them."""
    file = Path(path)
    return file.is_relative_to(_LAYERS) and file.name not in ("module.py", "container.py")


@cache
def is_of_a_library(path: str) -> bool:
    """Tell whether a file is of torch, of Python or of this library, or a program that was traced."""
    file = Path(path)
    installed = {"site-packages", "dist-packages"}.intersection(file.parts)
    if file.name == "typing_extensions.py":  # torch decorates functions with it
        return True
    return (
        any(map(file.is_relative_to, _LIBRARIES))
        or (file.is_relative_to(_PYTHON) and not installed)
        or path.startswith("<")
    )
