"""Group the calls of a forward by the modules, or the parameters, that patterns name."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby

from torch.fx import Node

from ppfunc._checks import limited

from ...errors import StageError
from ...patterns import first_match
from .graph import operator_of


def stretches(
    calls: Sequence[Node], patterns: Collection[str], params: Mapping[Node, str], stage: str
) -> Iterator[tuple[str, set[Node]]]:
    """Group the calls of a forward by the modules that patterns name; a module has those of its submodules.

    A stage that calls no module is grouped by its parameters. Patterns match the name of a parameter, or the
    part of it before a dot. A call belongs to the parameter that it reads, or else to the one read last.

    Args:
        calls: in order.
        patterns: the first that matches counts.
        params: names of the parameters.
        stage: its name, for errors.

    Yields:
        A pattern, and calls of one module that follow one another.

    Raises:
        StageError: a pattern matches no name.
    """
    places = [operator_of(n).meta.get("module") for n in calls]
    known = {name for place in places if place is not None for name in place.names.values() if name}
    paths = ["" if place is None else place.name for place in places]
    if not (of_modules := bool(known)):
        known, paths = {p for name in params.values() for p in _prefixes(name)}, [*_last_read(calls, params)]
    for one in (one for pattern in patterns for one in pattern.split("|")):
        if not any(first_match(name, [one]) for name in known):
            names = limited(", ".join(sorted(known)), 300)
            reason = (
                f"remat: got {one!r}, expected names of {'modules' if of_modules else 'parameters'}: {names}"
            )
            mend = "correct the pattern, or give the stages that have such names an engine of their own"
            raise StageError(stage, reason, mend)

    def named(path: str) -> tuple[str, str]:
        inside = [name for name in _prefixes(path) if name in known]
        return next(((p, name) for p in patterns for name in inside if first_match(name, [p])), ("", ""))

    for (pattern, _), group in groupby(zip(map(named, paths), calls, strict=True), key=lambda pair: pair[0]):
        if pattern:
            yield pattern, {call for _, call in group}


def _prefixes(path: str) -> Iterator[str]:
    """Yield the names on the way to a place.

    >>> list(_prefixes("h.0.mlp"))
    ['h', 'h.0', 'h.0.mlp']
    """
    return accumulate(path.split("."), "{}.{}".format)


def _last_read(calls: Iterable[Node], params: Mapping[Node, str]) -> Iterator[str]:
    name = ""
    for call in calls:
        name = next((params[a] for a in call.all_input_nodes if a in params), name)
        yield name
