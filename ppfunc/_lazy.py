"""Load the public names of a package when they are first used, so that schedules can be studied without torch.

A package lists its names twice: under ``if TYPE_CHECKING``, as imports that type checkers and editors read,
and in the table that it passes to :func:`attach`. A test compares the two.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def attach(
    package: str, exports: Mapping[str, Sequence[str]], submodules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make ``__getattr__``, ``__dir__`` and ``__all__`` of a package.

    Args:
        package: the name of the package, ``__name__``.
        exports: the names that each of its modules defines, ``{"check": ("Certificate", "check")}``. A module that
            has the name of one of its exports is loaded at once: importing it later would hide that export.
        submodules: modules that are attributes too; they are in ``dir()`` and not in ``__all__``.

    >>> __getattr__, __dir__, __all__ = attach("ppfunc.parallel", {"topology": ("Topology", "default_grid")})
    >>> __all__, str(__getattr__("default_grid")(6))
    (['Topology', 'default_grid'], 'pipe=2,data=3')
    """
    module_of = {name: module for module, names in exports.items() for name in names}
    names = sorted([*module_of, *submodules])

    def load(name: str) -> Any:
        if name in submodules:
            return import_module(f"{package}.{name}")
        if name not in module_of:
            raise _unknown(package, name, names)
        value = getattr(import_module(f"{package}.{module_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    for name, module in module_of.items():
        if module in module_of:
            load(name)
    return load, lambda: list(names), sorted(module_of)


def _unknown(package: str, name: str, names: Sequence[str]) -> AttributeError:
    import difflib

    similar = difflib.get_close_matches(name, names, n=1)
    mend = f"did you mean {similar[0]!r}?" if similar else f"dir({package}) lists its names"
    # The name without the object: with both, Python's traceback would add a suggestion of its own.
    return AttributeError(f"module {package!r} has no attribute {name!r}; {mend}", name=name)
