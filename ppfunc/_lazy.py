"""Load the public names of a package when they are first used, so that schedules can be studied without
torch.
"""

import re
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from ppfunc._checks import suggestion

# Ten times faster than `ast`, at every import.
_IMPORT = re.compile(r"from \.(?P<module>[\w.]*) import|(?P<name>\w+) as (?P=name)\b")


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make ``__getattr__``, ``__dir__`` and ``__all__`` of a package from its imports under
    ``if TYPE_CHECKING``.

    So its names are listed once, for type checkers, for editors and for the program.
    ``from . import module as module`` makes a module an attribute, which is in ``dir()`` and not in
    ``__all__``. A module that has the name of one of its exports is loaded at once: importing it later would
    hide that export.

    >>> import ppfunc.parallel
    >>> __getattr__, __dir__, __all__ = attach("ppfunc.parallel")
    >>> "topology" in __all__, str(__getattr__("default_grid")(6))
    (False, 'pipe=2,data=3')
    """
    spec = sys.modules[package].__spec__
    assert spec is not None and spec.loader is not None
    source = spec.loader.get_source(package)  # type: ignore[attr-defined]
    module_of, module = dict[str, str](), ""  # "" for modules themselves
    for match in _IMPORT.finditer(source.partition("if TYPE_CHECKING:")[2].partition("\nelse:")[0]):
        if match["name"] is None:
            module = match["module"]
        else:
            module_of[match["name"]] = module
    exports = sorted(name for name, module in module_of.items() if module)

    def load(name: str) -> Any:
        if name not in module_of:
            mend = suggestion(name, module_of) or f"; dir({package}) lists its names"
            # The name without the object: with both, Python's traceback would add a suggestion of its own.
            raise AttributeError(f"module {package!r} has no attribute {name!r}{mend}", name=name)
        module = module_of[name]
        home = import_module(f"{package}.{module or name}")
        value = getattr(home, name) if module else home
        setattr(sys.modules[package], name, value)
        return value

    for name in exports:
        if module_of[name] in exports:
            load(name)
    return load, lambda: sorted(module_of), exports


def late(module: str, name: str) -> Callable[..., Any]:
    """Return a function that imports the real one from its module at the first call.

    It breaks an import circle: a class whose methods are in a module that imports the class.

    >>> late("ppfunc.parallel.placement", "loop")(3)
    (0, 1, 2)
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(module), name)(*args, **kwargs)

    call.__name__ = name
    return call
