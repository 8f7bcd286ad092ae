"""Find builders by their names, in any spelling."""

import re
from collections.abc import Callable

from ppfunc._checks import require_type, suggestion

from .builders import BUILDERS
from .schedule import Schedule

# Names of torch.distributed.pipelining that are not those of our builders in another spelling.
_NAMES_IN_TORCH = {"interleavedzerobubble": "interleaved_zb", "zbvzerobubble": "zbv"}


def find_builder(name: str) -> Callable[..., Schedule]:
    """Find a builder by its name in any spelling.

    A schedule has the name of its function, but for ``"1f1b"``, which is :func:`one_f_one_b`: names in Python
    begin with a letter. ``"Schedule1F1B"`` of torch is the same builder.

    Raises:
        ValueError: for an unknown name, with the known ones and the most similar.
    """
    require_type("name", name, str, "that of a schedule, such as '1f1b'")
    spellings = {_plain(builder.__name__): builder for builder in BUILDERS.values()}
    spellings |= {_plain(known): builder for known, builder in BUILDERS.items()}
    spellings |= {theirs: BUILDERS[ours] for theirs, ours in _NAMES_IN_TORCH.items()}
    plain = _plain(name)
    if plain not in spellings:
        # The first builder whose name begins so, else the most similar.
        begun = next((known for known in BUILDERS if known.startswith(name.lower())), name.lower())
        raise ValueError(
            f"unknown schedule {name!r}: expected one of {', '.join(BUILDERS)}{suggestion(begun, BUILDERS)}"
        )
    return spellings[plain]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("schedule")
