"""Check the numbers of ranks, stages, layers and microbatches that users pass."""

from ppfunc._text import shown


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
            number = isinstance(got, float | int | str | None)
            model = "" if number else "; models and stages go to pp.value_and_grad(stages, loss_fn, schedule)"
            raise ValueError(
                f"{name} = {repr(got) if number else shown(got)}, expected an integer of at least {least}:"
                f" pass {name}={least} or more{model}"
            )
