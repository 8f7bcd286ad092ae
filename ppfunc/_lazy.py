"""Load the public names of a package when they are first used, so that schedules can be studied without
torch.
"""

import re
import sys
from collections.abc import Callable, Mapping
from dis import opname
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from ppfunc._checks import suggestion


def attach(
    package: str, names: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make ``__getattr__``, ``__dir__`` and ``__all__`` of a package.

    Args:
        package: name of the package.
        names: public names, apart by blanks, by the module of the package that has them. Those of ``""`` are
            modules of the package, which are in ``dir()`` and not in ``__all__``.

    Type checkers read the same names under ``if TYPE_CHECKING``; a test compares them.

    >>> import ppfunc.parallel
    >>> __getattr__, __dir__, __all__ = attach("ppfunc.parallel", {"topology": "default_grid"})
    >>> __dir__(), __all__, str(__getattr__("default_grid")(6))
    (['default_grid'], ['default_grid'], 'pipe=2,data=3')
    """
    home_of = {name: module for module, line in names.items() for name in line.split()}

    def load(name: str) -> Any:
        if name not in home_of:
            lines = (sys.modules[package].__doc__ or "").splitlines()
            told = next((line for line in lines if re.search(rf"\b{name}\b", line, re.IGNORECASE)), "")
            mend = suggestion(name, home_of) or (
                f"; help({package}) says: {' '.join(told.split())}"
                if told
                else f"; dir({package}) lists its names"
            )
            raise _unknown(package, name, mend)
        module = import_module(f"{package}.{home_of[name] or name}")
        value = getattr(module, name) if home_of[name] else module
        for each in (module, value):
            if isinstance(each, ModuleType):  # unknown names of a module that is used as a whole
                vars(each).setdefault("__getattr__", partial(_refuse, each))
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted(home_of), sorted(name for name, module in home_of.items() if module)


def _refuse(module: ModuleType, name: str) -> NoReturn:
    """Stand as ``__getattr__`` of a module that is loaded as a whole."""
    own = (n for n, thing in vars(module).items() if getattr(thing, "__module__", "") == module.__name__)
    names = [n for n in vars(module).get("__all__", own) if not n.startswith("_")]
    near = "" if name.startswith("__") else suggestion(name, names) or f"; it has {', '.join(names)}"
    raise _unknown(module.__name__, name, near)


def _unknown(module: str, name: str, mend: str) -> Exception:
    """Make the error for ``module.name``, or for ``from module import name``."""
    asking = sys._getframe(2)
    imports = opname[asking.f_code.co_code[asking.f_lasti]] == "IMPORT_FROM"
    # The name without the object: with both, Python's traceback would add a suggestion of its own.
    return (ImportError if imports else AttributeError)(
        f"module {module!r} has no attribute {name!r}{mend}", name=name
    )
