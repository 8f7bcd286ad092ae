"""Match names with patterns as a shell does, ``|`` between alternatives; the first match counts."""

import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase


def first_match(name: str, patterns: Iterable[str]) -> str | None:
    """Return the first of the patterns that matches a name, or None.

    >>> first_match("h.0.bias", ["*norm*|*.bias", "*"])
    '*norm*|*.bias'
    """
    return next((p for p in patterns if any(fnmatchcase(name, one) for one in p.split("|"))), None)


def note_patterns(used: dict[str, bool], what: str, patterns: Collection[str], names: Iterable[str]) -> None:
    """Note which patterns take one of these names; ``"*"`` may take none, since it stands for the rest.

    An alternative has to match a name, which an earlier pattern may take.

    >>> used = {}
    >>> note_patterns(used, "groups", ["*bias", "*norm*", "*"], ["h.bias"])
    >>> [text for text, takes in used.items() if not takes]
    ["groups: '*norm*' of '*bias', '*norm*', '*'"]
    >>> used = {}
    >>> note_patterns(used, "groups", ["*bias|*bais", "h*|*bias"], ["h.bias", "h.weight"])
    >>> [text for text, takes in used.items() if not takes]
    ["groups: '*bais' of '*bias|*bais', 'h*|*bias'"]
    """
    names = list(names)
    taken = {"*", *(first_match(name, patterns) for name in names)}
    for pattern in patterns:
        for one in dict.fromkeys([pattern, *pattern.split("|")]):
            takes = (
                pattern in taken
                if one == pattern
                else one == "*" or any(first_match(n, [one]) for n in names)
            )
            text = f"{what}: {one!r} of {', '.join(map(repr, patterns))}"
            used[text] = used.get(text, False) or takes


def require_reachable(what: str, patterns: Iterable[str]) -> None:
    """Raise ValueError for a pattern that an earlier one hides, since it takes all of its names.

    >>> require_reachable("reduce_state", ["*", "*counts"])
    Traceback (most recent call last):
        ...
    ValueError: reduce_state: '*counts' comes after '*', which takes all of its names; put it before
    """
    earlier: list[str] = []
    for pattern in patterns:
        for one in pattern.split("|"):
            # Of an earlier pattern with stars alone: what stands for several characters meets a star.
            names = re.sub(r"\[!?.[^]]*\]", "?", one)
            for other in earlier:
                if one == other or (not set("?[") & set(other) and fnmatchcase(names, other)):
                    raise ValueError(
                        f"{what}: {one!r} comes after {other!r}, which takes all of its names; put it before"
                    )
        earlier += pattern.split("|")
