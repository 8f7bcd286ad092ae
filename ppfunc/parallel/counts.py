"""Check the numbers of ranks, stages, layers and microbatches that users pass."""


def require_counts(least: int = 1, /, **counts: object) -> None:
    """Check that every count is an integer of at least ``least``.

    Args:
        least: the smallest count that makes sense.
        counts: the counts, by the names of the arguments that they were passed as.

    Raises:
        ValueError: one is not; says which.
    """
    for name, got in counts.items():
        if isinstance(got, bool) or not isinstance(got, int) or got < least:
            raise ValueError(
                f"{name} = {got!r}, expected an integer of at least {least}: pass {name}={least} or more"
            )
