"""Name the module in whose call an operator is called."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import NamedTuple

from torch import nn

TRACED_MODULES = "ppfunc_traced_modules"
"""A global name of programs that were traced: by line, the place in the user's modules."""

Names = dict[int, tuple[nn.Module, dict[int, str]]]
"""An outermost module, by identity, with the names of all modules in it, by identity."""
_CALL = nn.Module._call_impl.__code__


class ModulePlace(NamedTuple):
    """Describe a place in the calls of modules.

    Args:
        name: of the innermost module, within the outermost one; empty for that itself.
        names: of all modules within the outermost one, by identity.
    """

    name: str
    names: Mapping[int, str]


def module_of_call(end: str, known: Names) -> ModulePlace | None:
    """Find the module whose call runs now below the file ``end``; None outside of modules.

    Of a program that was traced, it is the module that was traced.

    Args:
        known: names that were asked for before; new ones are added.
    """
    inside: list[nn.Module] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != end:
        if frame.f_code is _CALL:
            inside.append(frame.f_locals["self"])
        elif traced := frame.f_globals.get(TRACED_MODULES, {}).get(frame.f_lineno):
            place: ModulePlace = traced
            return place
        frame = frame.f_back
    if not inside:
        return None
    outermost = inside[-1]
    if id(outermost) not in known:
        lists = nn.ModuleList, nn.ModuleDict  # which nobody calls
        named = {id(m): name for name, m in outermost.named_modules() if not isinstance(m, lists)}
        known[id(outermost)] = outermost, named
    names = known[id(outermost)][1]
    return ModulePlace(next(names[id(m)] for m in inside if id(m) in names), names)
