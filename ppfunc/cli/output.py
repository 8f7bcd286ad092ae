"""Write text to a file or to standard output."""

import sys
from pathlib import Path

from .parser import escaped


def write(text: str, path: Path | None = None) -> None:
    """Write ``text`` to the file ``path``, or to standard output with its control characters escaped."""
    if path is None:
        sys.stdout.write(escaped(text))
    else:
        path.write_text(text, encoding="utf-8", newline="")
