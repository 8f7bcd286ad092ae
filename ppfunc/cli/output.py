"""Write text to a file or to standard output."""

import sys
from collections.abc import Mapping
from pathlib import Path

from .parser import escaped

_OTHER_PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".webp", ".pdf", ".html")


def write(text: str, path: Path | None = None) -> None:
    """Write ``text`` to the file ``path``, or to standard output with its control characters escaped."""
    if path is None:
        sys.stdout.write(escaped(text))
    else:
        path.write_text(text, encoding="utf-8", newline="")


def require_folder(path: Path | None) -> None:
    """Refuse, before a long search, a file in a folder that is not there."""
    if path and not path.parent.is_dir():
        raise ValueError(f"--out {path}: no directory {path.parent}, make it first")


def form_of(path: Path | None, chosen: str | None, suffixes: Mapping[str, tuple[str, ...]]) -> str:
    """Return the chosen format, else that of the file's suffix, else the first.

    Args:
        path: where it is written; None for standard output.
        chosen: the value of ``--format``.
        suffixes: of every format.

    Raises:
        ValueError: the suffix is that of another format, or says none.

    >>> form_of(Path("x.svg"), None, {"grid": (".txt",), "svg": (".svg",)})
    'svg'
    """
    suffix = "" if path is None else path.suffix.lower()
    if not suffix:
        return chosen or next(iter(suffixes))
    forms = [form for form, own in suffixes.items() if suffix in own]
    if chosen is None and not forms:
        raise ValueError(
            f"--out {path}: its suffix says no format, give --format, one of {', '.join(suffixes)}"
        )
    if chosen is not None and chosen not in forms and (forms or suffix in _OTHER_PICTURES):
        raise ValueError(
            f"--out {path}: expected a name that ends in {' or '.join(suffixes[chosen])}, for --format"
            f" {chosen}"
        )
    return chosen or forms[0]
