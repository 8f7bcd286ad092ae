"""Build schedules of slices of sequences: every stage hands a carry from a slice to the next.

The forwards of a sequence go from its first slice to its last, and its backwards from the last to the first,
so that the first backward waits for all slices of its sequence: a warm-up is longer by ``k - 1`` slices than
without. A slice costs a k-th of a sequence, and so do a bubble and an activation.
"""

from collections.abc import Iterator
from dataclasses import replace

from ppfunc._checks import naming_arguments, require_counts
from ppfunc.parallel.topology import loop

from ..instruction import B, F, Instruction
from ..schedule import Schedule, single_chain
from .loops import alternate, delayed_weights, group_size, walk


@naming_arguments
def seq1f1b(ranks: int, sequences: int, slices: int = 2, chunks: int = 1) -> Schedule:
    """Run slices as 1F1B runs microbatches, backwards from the last slice of a sequence; or interleaved.

    Bubble time ``(p - 1)(F + B)`` of a slice; of the makespan ``(p - 1) / (n k + p - 1)``; at most
    ``min(p - r + k - 1, n k)`` live activations of slices on rank r. With v stages per rank the warm-up is
    that of interleaved 1F1B and ``k - 1`` forwards.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(seq1f1b(ranks=2, sequences=2, slices=2)), end="")
    rank 0  0F0 0F1 0F2  .  0B1 0F3 0B0  .  0B3 0B2
    rank 1   .  1F0 1F1 1B1 1F2 1B0 1F3 1B3 1B2  .

    Args:
        ranks: number of ranks p.
        sequences: number of sequences n; microbatch m is slice ``m % k`` of sequence ``m // k``.
        slices: number of slices k of a sequence.
        chunks: stages per rank v; rank r holds stages r, r + p, ...

    Raises:
        ValueError: an argument is below 1.

    References:
        Sun et al., Seq1F1B (arXiv:2406.03488), section 3; Li et al., TeraPipe, ICML 2021 (arXiv:2102.07988),
        for the forwards.
    """
    size, forwards, backwards = _orders(ranks, sequences, slices, chunks)

    def program_of(r: int) -> Iterator[Instruction]:
        warm_up = (1 + (chunks > 1)) * (ranks - 1 - r) + (chunks - 1) * size + slices - 1
        mine = [F(chunk * ranks + r, m) for chunk, m in forwards]
        return alternate(mine, [[B(chunk * ranks + r, m)] for chunk, m in backwards], warm_up)

    programs = map(program_of, range(ranks))
    return single_chain("seq1f1b", loop(ranks, chunks), sequences * slices, programs, slices=slices)


@naming_arguments
def seq_zb(ranks: int, sequences: int, slices: int = 2, chunks: int = 1) -> Schedule:
    """Run slices as ZB-H1 runs microbatches, input gradients from the last slice; or as interleaved ZB does.

    Bubble time ``(p - 1)(F + I - W)/v`` of a slice where ``n k >= p + k - 1`` and W <= I; weight gradients
    of rank r follow r input gradients late.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(seq_zb(ranks=2, sequences=2, slices=2)), end="")
    rank 0  0F0 0F1 0F2  .  0I1 0W1 0F3 0I0 0W0 0I3 0W3 0I2 0W2
    rank 1   .  1F0 1F1 1I1 1F2 1I0 1W1 1F3 1I3 1W0 1I2 1W3 1W2

    Args:
        ranks: number of ranks p.
        sequences: number of sequences n; microbatch m is slice ``m % k`` of sequence ``m // k``.
        slices: number of slices k of a sequence.
        chunks: stages per rank v; rank r holds stages r, r + p, ...

    Raises:
        ValueError: an argument is below 1.

    References:
        Sun et al., Seq1F1B (arXiv:2406.03488), section 3; Qi et al., Zero Bubble Pipeline Parallelism, ICLR
        2024 (arXiv:2401.10241), section 2.
    """
    size, forwards, backwards = _orders(ranks, sequences, slices, chunks)

    def program_of(r: int) -> Iterator[Instruction]:
        warm_up = ranks - 1 - r + (chunks - 1) * size + slices - 1
        mine = [F(chunk * ranks + r, m) for chunk, m in forwards]
        return delayed_weights(mine, [(chunk * ranks + r, m) for chunk, m in backwards], warm_up, delay=r)

    programs = map(program_of, range(ranks))
    return single_chain("seq_zb", loop(ranks, chunks), sequences * slices, programs, slices=slices)


@naming_arguments
def decode(ranks: int, sequences: int, slices: int = 2) -> Schedule:
    """Run the first slices of all sequences, then the second slices, and no backward: a slice is a token.

    What the last stage returns for a slice goes back to stage 0 for the next slice of the sequence, as
    :func:`~ppfunc.with_skips` tells: a model generates many sequences from its own output. Bubble time
    ``(p - 1)F`` where there are at least as many sequences as ranks: no rank waits for a token.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(decode(ranks=2, sequences=3, slices=2)), end="")
    rank 0  0F0 0F2 0F4 0F1 0F3 0F5  .
    rank 1   .  1F0 1F2 1F4 1F1 1F3 1F5

    Args:
        ranks: number of ranks p, one stage each, from 2: a single stage hands itself what it returns.
        sequences: number of sequences n; microbatch m is slice ``m % k`` of sequence ``m // k``.
        slices: number of slices k of a sequence.

    Raises:
        ValueError: an argument is below 1, or ``ranks`` below 2.
    """
    require_counts(2, ranks=ranks)
    require_counts(sequences=sequences, slices=slices)
    order = [n * slices + j for j in range(slices) for n in range(sequences)]
    programs = ([F(rank, m) for m in order] for rank in range(ranks))
    made = single_chain("decode", loop(ranks), sequences * slices, programs, slices=slices)
    return replace(made, skips=((ranks - 1, 0),))


_Places = list[tuple[int, int]]  # chunk and microbatch, in order


def _orders(ranks: int, sequences: int, slices: int, chunks: int) -> tuple[int, _Places, _Places]:
    """Return the size of a group in slices, and the orders of all forwards and of all backwards of a rank."""
    require_counts(ranks=ranks, sequences=sequences, slices=slices, chunks=chunks)
    size = group_size(ranks, sequences * slices, chunks, slices=slices)
    order = walk(sequences, chunks, size // slices)
    forwards = [(chunk, n * slices + j) for chunk, n in order for j in range(slices)]
    backwards = [(chunks - 1 - chunk, n * slices + j) for chunk, n in order for j in reversed(range(slices))]
    return size, forwards, backwards
