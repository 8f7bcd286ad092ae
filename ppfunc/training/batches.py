"""Read the arguments of the steps of one call of a trainer, and divide its results by step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ppfunc._checks import shown
from ppfunc.runtime import Microbatches, StepResult
from ppfunc.runtime.values.arguments import LossWeights, RawArguments, Seed, read_loss_weights, read_seed
from ppfunc.stage.tree import tree_map

from .update.train_state import Metrics


class Batches(NamedTuple):
    """Hold the arguments of the steps of one call, as the caller gave them.

    Args:
        pairs: inputs and targets of every step.
        weights, extras: one entry per step, or None; an entry may be None too.
        seed: of the first step.
        losses, outputs, norms: whether the metrics get the losses of all microbatches, the outputs of last
            stages, and norms by stage and by name.
    """

    pairs: Sequence[tuple[Any, Any]]
    weights: Sequence[LossWeights] | None = None
    seed: Seed = None
    extras: Sequence[Mapping[int, Any] | None] | None = None
    losses: bool = False
    outputs: bool = False
    norms: bool = False

    @property
    def wanted(self) -> tuple[str, ...]:
        """Return the fields of a StepResult that are asked for."""
        return (*(["losses"] if self.losses else []), *(["outputs"] if self.outputs else []))

    def arguments(
        self, common: RawArguments, microbatches: int, to_compute: Callable[[Any], Any]
    ) -> list[RawArguments]:
        """Return the arguments of every step.

        Args:
            common: the arguments that all steps share. The results add weights, seed and norms to its text
                ``common``, which ranks compare.
            microbatches: of a step.
            to_compute: casts inputs.

        Raises:
            TypeError, ValueError: not a list of pairs, no pairs, a negative weight, or weights or extras for
                another number of steps.
        """
        if not isinstance(self.pairs, list | tuple) or not all(
            isinstance(pair, list | tuple) and len(pair) == 2 for pair in self.pairs
        ):
            raise TypeError(
                f"batches: got {shown(self.pairs)}, expected a list of (inputs, targets), one for every step;"
                " of an iterator, take list(itertools.islice(iterator, steps))"
            )
        if not self.pairs:
            raise ValueError("batches: got an empty list, expected (inputs, targets) of at least one step")
        weights = _of_every_step("loss_weights", self.weights, len(self.pairs))
        extras = _of_every_step("extras", self.extras, len(self.pairs))
        own, seed = "equal" if weights[0] is None else "own", read_seed(self.seed)
        norms = ", norms by name" if self.norms else ""
        text = f"{len(self.pairs)} steps, {own} weights, seed {seed}{norms}{common.common}"
        return [
            replace(
                common,
                inputs=inputs.map(to_compute) if isinstance(inputs, Microbatches) else to_compute(inputs),
                targets=targets,
                extras=extras[n],
                loss_weights=_nonnegative(read_loss_weights(weights[n], microbatches)),
                seed=seed and (seed[0], seed[1] + n),
                common=text,
            )
            for n, (inputs, targets) in enumerate(self.pairs)
        ]


def with_results(metrics: Sequence[Metrics], result: StepResult) -> list[Metrics]:
    """Add metrics and outputs of the stages, and ``aux`` of the loss, to the metrics of every step."""
    count, aux = len(metrics), result.aux
    return [
        each._replace(
            stages={s: _rows_of(tree, n, count) for s, tree in aux.metrics.items()},
            aux=_rows_of(aux.loss, n, count),
            outputs=_rows_of(result.outputs, n, count),
        )
        for n, each in enumerate(metrics)
    ]


def _of_every_step(name: str, values: Any, steps: int) -> Sequence[Any]:
    """Return one value for each step; raise ValueError for another number, or if only some have one."""
    if values is None:
        return [None] * steps
    if not isinstance(values, list | tuple) or len(values) != steps or len({v is None for v in values}) > 1:
        raise ValueError(f"{name}: got {shown(values)}, expected a list of {steps}, one for every step")
    return values


def _nonnegative(weights: torch.Tensor | None) -> torch.Tensor | None:
    """Raise ValueError for a negative weight: divided by their sum, all of them could change their sign."""
    if weights is not None and weights.device.type == "cpu" and min(weights.tolist()) < 0:
        raise ValueError(
            f"loss_weights: got {weights.tolist()}, expected numbers of at least 0, which are divided by"
            " their sum; where a loss is to rise, give it another sign in the loss function"
        )
    return weights


def _rows_of(tree: Any, n: int, steps: int) -> Any:
    """Take the rows of one of several steps out of a tree, or Microbatches, of the rows of all."""
    if isinstance(tree, Microbatches):
        rows = list(tree)
        size = len(rows) // steps
        return Microbatches(rows[n * size : (n + 1) * size])
    return tree if steps == 1 else tree_map(lambda t: t.tensor_split(steps)[n], tree)
