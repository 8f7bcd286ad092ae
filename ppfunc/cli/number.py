"""Read a number from the command line."""


def number(text: str) -> float:
    """Read a number; whole numbers stay whole, so that sums of them are exact.

    Raises:
        ValueError: ``text`` is not a number.

    >>> number("3"), number("0.5")
    (3, 0.5)
    """
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"expected a number, got {text!r}") from None
