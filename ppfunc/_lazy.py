"""Load the public names of a package when they are first used, so that schedules can be studied without
torch.
"""

import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from ppfunc._checks import mend_of, suggestion

# Ten times faster than `ast`, at every import.
_IMPORT = re.compile(r"from \.(?P<module>[\w.]*) import|(?P<name>\w+) as (?P=name)\b")


def attach(
    package: str, look_in: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
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
    sys.modules[package].__class__ = _Package
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
            homes = [] if name.startswith("_") else look_in
            places = {inner: f"{home}.{inner}" for home in reversed(homes) for inner in dir(load(home))}
            raise _unknown(package, name, sorted(module_of), places)
        module = module_of[name]
        home = import_module(f"{package}.{module or name}")
        value = getattr(home, name) if module else home
        for each in (home, value):  # a module that is imported for a name is an attribute, never loaded
            if isinstance(each, ModuleType):
                each.__class__ = _Package
        setattr(sys.modules[package], name, value)
        return value

    for name in exports:
        if module_of[name] in exports:
            load(name)
    return load, lambda: sorted(module_of), exports


class _Package(ModuleType):
    """A module that says what to write when it is called, as a function elsewhere of its name is."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        mend = mend_of("module", self.__name__.rpartition(".")[2]) or f"dir({self.__name__}) lists its names"
        raise TypeError(f"{self.__name__} is a module, not a function; here: {mend}")


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


def _unknown(package: str, name: str, names: list[str], places: dict[str, str]) -> AttributeError:
    if mend := mend_of("ppfunc", name):
        return AttributeError(f"module {package!r} has no attribute {name!r}; here: {mend}", name=name)
    mend = "" if name in places else suggestion(name, names)
    place = places.get(name) or {inner.lower(): place for inner, place in places.items()}.get(name.lower())
    if not mend and hasattr(sys.modules.get("torch.func"), name):
        mend = f"; torch.func.{name} goes around a step of one process, ppfunc.hvp and ppfunc.jvp are for all"
    mend = mend or (f"; it is {package}.{place}" if place else f"; dir({package}) lists its names")
    # The name without the object: with both, Python's traceback would add a suggestion of its own.
    return AttributeError(f"module {package!r} has no attribute {name!r}{mend}", name=name)
