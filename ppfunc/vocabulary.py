"""Cut the output layer of a model into parts of its vocabulary, which are stages of several ranks.

Each part computes its own logits and two statistics of each token; the loss joins the statistics. The
gradient of the hidden state is the sum over the parts, as of any value that several stages take: there is no
collective.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from optree import tree_flatten_one_level
from torch import Tensor

from ppfunc._checks import (
    naming_arguments,
    require_counts,
    require_number,
    require_one_of,
    require_type,
    shown,
)
from ppfunc.runtime.lowering.ties import TiedPlaces
from ppfunc.schedule import Schedule
from ppfunc.splitter import Split
from ppfunc.stage import Loss, Stage
from ppfunc.stage.frozen import note_parts
from ppfunc.stage.layout import layout_of
from ppfunc.stage.program import TARGETED, Output
from ppfunc.stage.signature import names_in
from ppfunc.stage.tree import NAMESPACE, tree_flatten, tree_leaves, tree_map


class VocabularyLoss(NamedTuple):
    """Hold a loss of logits that lie in parts.

    As a loss function, ``loss(output, target)``, it computes the loss of whole logits: the output, its only
    tensor, or its attribute ``logits``.

    Args:
        partial: a function ``partial(logits, target, start, vocabulary) -> statistics``, a tree of tensors.
            ``logits`` are [..., v], of the entries from ``start`` of a vocabulary of this size.
        join: a function ``join(statistics of all parts, target) -> scalar``, or ``-> (scalar, aux)``; the
            statistics are a tuple of trees.
    """

    partial: Callable[[Tensor, Any, int, int], Any]
    join: Callable[[tuple[Any, ...], Any], Any]

    def __call__(self, output: Any, target: Any) -> Any:
        logits, *others = tree_leaves(getattr(output, "logits", output))
        if others:
            raise ValueError(f"output: got {shown(output)}, expected logits, or the attribute logits")
        return self.join((self.partial(logits, target, 0, logits.shape[-1]),), target)


@naming_arguments
def vocabulary_cross_entropy(
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> VocabularyLoss:
    """Make the cross entropy of logits that lie in parts.

    Equivalent to, of the whole logits, in float32 or float64::

        F.cross_entropy(logits, labels, ignore_index=..., label_smoothing=..., reduction=...)
            + z_loss * logits.logsumexp(-1).square()      # reduced likewise

    The target is the labels, an integer tensor[...], or a tuple ``(labels, weights)`` with a weight of each
    token; the mean then is the weighted sum over the sum of the weights. Tokens with the label
    ``ignore_index`` count in neither sum. A label that is no entry of the vocabulary gives the loss NaN.

    Args:
        ignore_index: the label of tokens that do not count, an int.
        label_smoothing: the share of the target that is spread over the whole vocabulary, from 0 to below 1.
        z_loss: the factor of the squared log-normaliser of each token, a float.
        reduction: ``"mean"`` over the tokens that count, or ``"sum"``.

    >>> loss = vocabulary_cross_entropy()
    >>> logits, labels = torch.eye(2, 4), torch.tensor([0, 3])
    >>> halves = [loss.partial(logits[:, at : at + 2], labels, at, 4) for at in (0, 2)]
    >>> loss.join(tuple(halves), labels), torch.nn.functional.cross_entropy(logits, labels)
    (tensor(1.2437), tensor(1.2437))
    """
    require_type("ignore_index", ignore_index, int, "a label, an integer")
    require_number("label_smoothing", label_smoothing, below=1.0)
    require_number("z_loss", z_loss)
    require_one_of("reduction", reduction, ("mean", "sum"))

    def statistics(logits: Tensor, target: Any, start: int, vocabulary: int) -> tuple[Tensor, Tensor]:
        labels, _ = _labels_and_weights(target, logits.shape[:-1])
        # The name is given away at each step, so that two tensors as wide live at once, and one is kept.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        own = labels - start
        held = (own >= 0) & (own < logits.shape[-1])
        at = torch.arange(own.numel(), device=own.device), own.clamp(0, logits.shape[-1] - 1).flatten()
        logits, at_label = _Picked.apply(logits.flatten(0, -2), *at)
        wanted = torch.where(held.flatten(), at_label, 0.0) * (1 - label_smoothing)
        if label_smoothing:
            wanted = wanted + logits.sum(-1) * (label_smoothing / vocabulary)
        # The bounds give zeros, not NaN, to a part whose logits are all minus infinity.
        bounds = torch.finfo(logits.dtype)
        largest = logits.detach().amax(-1).clamp(min=bounds.min)  # a constant, on which no sum below depends
        logits = logits - largest.unsqueeze(-1)
        normaliser = logits.exp().sum(-1).clamp(min=bounds.tiny).log() + largest
        normaliser, wanted = normaliser.view(labels.shape), wanted.view(labels.shape)
        known = ((labels >= 0) & (labels < vocabulary)) | (labels == ignore_index)
        return normaliser, torch.where(known, wanted, torch.nan)

    def join(parts: tuple[Any, ...], target: Any) -> Tensor:
        normalisers, wanted = (torch.stack(each) for each in zip(*parts, strict=True))
        normaliser = normalisers.logsumexp(0)
        labels, weights = _labels_and_weights(target, normaliser.shape)
        losses = normaliser - wanted.sum(0)
        if z_loss:
            losses = losses + z_loss * normaliser.square()
        counts = labels != ignore_index
        weights = counts if weights is None else torch.where(counts, weights, 0)
        weights = weights.to(losses.dtype)  # a sum in their own dtype may be off
        total = (losses * weights).sum()
        return total / weights.sum() if reduction == "mean" else total

    return VocabularyLoss(statistics, join)


class _Picked(torch.autograd.Function):
    """Return a matrix and an element of each of its rows.

    The gradient of the elements is added to the gradient of the matrix; by indexing it would be a matrix too.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        return matrix.view_as(matrix), matrix[row, column]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        matrix, elements = gradients
        return matrix.index_put(ctx.saved_tensors, elements, accumulate=True), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0].view_as(tangents[0]), tangents[0][ctx.saved_tensors]


def _labels_and_weights(target: Any, shape: torch.Size) -> tuple[Tensor, Tensor | None]:
    labels, weights = target if isinstance(target, tuple) and len(target) == 2 else (target, None)
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype is torch.bool:
        raise TypeError(
            f"target: got {shown(target)}, expected labels, a tensor of integers, or (labels, weights)"
        )
    for name, tensor in (("labels", labels), ("weights", weights)):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{name}: got the shape {list(tensor.shape)}, expected {list(shape)}, of the tokens of the"
                " logits"
            )
    return labels.long(), weights  # bytes cannot hold numbers of a large vocabulary, and index as masks


@dataclass(frozen=True, eq=False)
class VocabularyParallel:
    """Stages whose output layer is cut into parts: the ``stages`` of a step or a trainer.

    Args:
        stages: the functions: the stages before the output layer, its parts, the stage that joins their
            statistics, which has no parameters, and the encoder, if the split has one.
        edges: the edges of the ``Flow`` of a schedule: each part takes the hidden state. None for a chain,
            where there is one part.
        skips: the skips of a split.
        tied: ``{name: ((stage, name), ...)}``, the tied parameters.
        loss_fn: the loss function of a step or a trainer: it joins the statistics of the parts.
    """

    stages: tuple[Stage | None, ...]
    edges: tuple[tuple[int, int], ...] | None
    skips: tuple[tuple[int, int], ...]
    tied: dict[str, tuple[tuple[int, str], ...]]
    loss_fn: Loss
    _head: int = field(repr=False)  # the number of the output layer, and of its first part
    _sizes: tuple[int, ...] = field(repr=False)
    _also_cut: Mapping[int, tuple[str, ...]] = field(repr=False)  # leaves that are tied with the output layer

    def require_place(self, schedule: Schedule) -> None:
        """Raise ValueError for a schedule without the edges of the parts."""
        number = schedule.model_stages
        pairs = {(number[a], number[b]) for flow in schedule.flows for a, b in flow.pairs}
        if missing := [edge for edge in self.edges or () if edge not in pairs]:
            n = len(self._sizes)
            raise ValueError(
                f"stages: got a model with its output layer in {n} parts, and the schedule {schedule.name!r},"
                f" which has no edge {missing[0]}; take pp.with_parts(schedule, ranks=[...]), of a schedule"
                f" for the {self._head} stages before, with the rank of each of the {n} parts"
            )

    @naming_arguments
    def cut(self, params: Mapping[int, Any]) -> dict[int, Any]:
        """Cut the parameters of whole stages, or a tree of their form.

        A leaf in another stage that is tied with a leaf of the output layer becomes a tuple of parts.

        Args:
            params: ``{stage: tree}``, of any of the stages that were given; those of the output layer have
                the vocabulary as axis 0.

        Returns:
            ``{stage: tree}`` for ``stages``. The parts are views, which keep the whole leaf in memory: a
            process that holds some of them alone clones these.

        Raises:
            ValueError: a leaf has another number of rows than the vocabulary, or is a DTensor.
        """
        more = len(self._sizes)
        trees = {
            stage + more * (stage > self._head): self._with_cut(stage, tree, self._parts)
            for stage, tree in params.items()
        }
        if self._head in trees:
            whole = trees.pop(self._head)
            leaves, treedef = tree_flatten(whole)
            names = (f"params[{self._head}] {name!r}" for name in names_in(treedef))
            each = zip(*map(self._parts, leaves, names), strict=True)
            trees |= {self._head + n: treedef.unflatten(part) for n, part in enumerate(each)}
            trees[self._head + more] = ()
        return trees

    @naming_arguments
    def join(self, params: Mapping[int, Any]) -> dict[int, Any]:
        """Join the parameters of the parts again, or gradients, or another tree of their form.

        What is joined fits the stages that were given, such as those of ``Split.put_back``, and the ``cut``
        of another number of parts.

        Args:
            params: ``{stage: tree}``, in the form that ``cut`` returns; with a part come all.

        Raises:
            ValueError: some of the parts are missing, or leaves have no rows of the vocabulary.
        """
        more = len(self._sizes)
        parts = range(self._head, self._head + more)
        others = {s - more * (s > self._head): s for s in params if s not in (*parts, parts.stop)}
        trees = {stage: self._with_cut(stage, params[s], _joined) for stage, s in others.items()}
        if missing := [n for n in parts if n not in params and not params.keys().isdisjoint(parts)]:
            raise ValueError(
                f"params: got the stages {[*params]}, and stage {missing[0]} is missing; give all parts of"
                f" the output layer, {[*parts]}"
            )
        if parts[0] in params:
            first, *rest = (params[n] for n in parts)
            trees[self._head] = tree_map(lambda *each: _joined(each, f"params[{self._head}]"), first, *rest)
        return trees

    def _with_cut(self, stage: int, tree: Any, change: Callable[[Any, str], Any]) -> Any:
        """Change the leaves of a stage that are tied with the output layer."""
        return _changed(tree, self._also_cut.get(stage, ()), change, f"params[{stage}]")

    def _parts(self, leaf: Any, name: str) -> tuple[Tensor, ...]:
        rows = sum(self._sizes)
        if not isinstance(leaf, Tensor) or layout_of(leaf) is not None or [*leaf.shape[:1]] != [rows]:
            got = (
                f"a {type(leaf).__name__} of shape {[*leaf.shape]}"
                if isinstance(leaf, Tensor)
                else shown(leaf)
            )
            raise ValueError(f"{name}: got {got}, expected a plain tensor with {rows} rows, the vocabulary")
        return leaf.split([*self._sizes])


def _changed(
    tree: Any, names: Sequence[str], change: Callable[[Any, str], Any], root: str, at: str = ""
) -> Any:
    """Change the named branches of a tree; a name is the keys on the way, joined by dots."""
    if at in names:
        return change(tree, f"{root} {at!r}")
    if not names or tree is None or isinstance(tree, Tensor):
        return tree
    children, metadata, keys, unflatten = tree_flatten_one_level(tree, namespace=NAMESPACE)
    each = zip(children, keys, strict=True)
    return unflatten(
        metadata, [_changed(child, names, change, root, f"{at}.{key}".lstrip(".")) for child, key in each]
    )


def _joined(parts: Sequence[Tensor], name: str) -> Tensor:
    if not all(isinstance(part, Tensor) and part.ndim for part in parts):
        raise ValueError(
            f"{name}: got {shown(parts[0])}, expected rows of the vocabulary; of the state of an optimizer,"
            " join each tree of the form of the parameters: {s: state.optimizer[s]['mean'] for s in"
            " state.optimizer}"
        )
    return torch.cat([*parts])


@naming_arguments
def vocabulary_parallel(
    stages: Sequence[Stage | None] | Split,
    parts: int | Sequence[int],
    loss: VocabularyLoss | None = None,
    *,
    tied: TiedPlaces = None,
) -> VocabularyParallel:
    """Cut the output layer of a model, its last stage, into parts of the vocabulary.

    Each part is a stage: it takes the hidden state of the stage before, and the target, and returns
    statistics of its logits. The loss function joins them, and is exact: the loss and gradients of the whole
    layer, but for the order of sums. With stages 0 to n, the last of which is the output layer, and p parts,
    the parts are the stages n to n + p - 1, and the join is stage n + p::

        split = pp.split(model, args, at=4, output="lm_head")
        model = pp.vocabulary_parallel(split, 4, pp.vocabulary_cross_entropy(z_loss=1e-4))
        schedule = pp.with_parts(pp.one_f_one_b(ranks=4, microbatches=8))
        step = pp.value_and_grad(model, model.loss_fn, schedule)
        loss, grads = step(model.cut(split.params), inputs, labels)
        split.put_back(model.join(params))

    The encoder of a split is the stage after the join, for ``pp.spread(pp.with_parts(...))``.

    Args:
        stages: functions, the last of which is the output layer, ``fn(params, hidden) -> logits``. All leaves
            of its parameters have the vocabulary as axis 0, and each logit depends on its own row alone, as
            in ``cap * tanh(linear(hidden, weight, bias) / cap)``. Or a :class:`ppfunc.Split` whose last stage
            begins at the output layer, as ``pp.split(..., output=)`` makes it.
        parts: the number of parts, of nearly equal sizes, for a split; or the rows of each part, ints.
        loss: the loss of logits in parts, by default ``pp.vocabulary_cross_entropy()``; of your own, a pair
            of functions ``(partial, join)``, see :class:`ppfunc.vocabulary.VocabularyLoss`.
        tied: ``{name: [(stage, name of a leaf), ...]}``, the tied parameters of functions. A leaf that is
            tied with the output layer, such as an embedding, becomes a tuple of parts in its own stage, each
            tied with a part of the layer.

    Raises:
        StageError: the last stage of a split does more than a linear layer and functions of each logit.
        TypeError, ValueError: not stages, not parts of the vocabulary, or not a loss.

    >>> layer = lambda params, h: torch.nn.functional.linear(h, params["weight"])
    >>> model = vocabulary_parallel([lambda w, x: x * w, layer], [3, 2])
    >>> params = model.cut({0: torch.tensor(2.0), 1: {"weight": torch.ones(5, 4)}})
    >>> [tuple(params[stage]["weight"].shape) for stage in (1, 2)], model.edges
    ([(3, 4), (2, 4)], ((0, 1), (0, 2), (1, 3), (2, 3)))
    """
    functions: tuple[Stage | None, ...]
    skips: tuple[tuple[int, int], ...] = ()
    encoders = 0
    if isinstance(stages, Split):
        if tied is not None:
            raise ValueError("tied: got ties beside a split, which has its own; leave it out")
        functions, tied, skips, rows = stages.stages, stages.tied, stages.skips, stages.output_rows()
        encoders = int(bool(stages.encoder))
    else:
        functions, tied, rows = tuple(stages), tied or {}, None
    sizes = _sizes(parts, rows)
    loss = VocabularyLoss(*(loss or vocabulary_cross_entropy()))
    head = len(functions) - 1 - encoders
    join, total = head + len(sizes), sum(sizes)
    number = [*range(head + 1), *range(join + 1, join + 1 + encoders)]  # of each stage that is given
    ties: dict[str, tuple[tuple[int, str], ...]] = {}
    also_cut: dict[int, tuple[str, ...]] = {}
    for name, places in tied.items():
        if all(stage != head for stage, _ in places):
            ties[name] = tuple((number[stage], leaf) for stage, leaf in places)
            continue
        for n in range(len(sizes)):
            ties[f"{name}.{n}"] = tuple(
                (head + n, leaf) if stage == head else (number[stage], f"{leaf}.{n}")
                for stage, leaf in places
            )
        for stage, leaf in places:
            if stage != head:
                also_cut[stage] = (*also_cut.get(stage, ()), leaf)
    others = [_taking_parts(fn, also_cut.get(stage, ()), len(sizes)) for stage, fn in enumerate(functions)]
    starts = accumulate(sizes[:-1], initial=0)
    chain = [(a, a + 1) for a in range(head - 1)]
    into = [(head - 1, head + n) for n in range(len(sizes))] if head else []
    return VocabularyParallel(
        (
            *others[:head],
            *(
                _part(functions[head], loss, start, size, total)
                for start, size in zip(starts, sizes, strict=True)
            ),
            _together if len(sizes) > 1 else _alone,
            *others[head + 1 :],
        ),
        (*chain, *into, *((head + n, join) for n in range(len(sizes)))) if len(sizes) > 1 else None,
        tuple((number[a], number[b]) for a, b in skips),
        ties,
        loss.join,
        head,
        sizes,
        also_cut,
    )


def _sizes(parts: int | Sequence[int], rows: int | None) -> tuple[int, ...]:
    """Read the rows of each part; ``rows`` is the size of the vocabulary where it is known."""
    if isinstance(parts, int) and rows is not None:
        require_counts(parts=parts)
        each, more = divmod(rows, parts)
        sizes = tuple(each + (n < more) for n in range(parts))
    elif isinstance(parts, list | tuple):
        sizes = tuple(parts)
        for n, size in enumerate(sizes):
            require_counts(**{f"parts[{n}]": size})
    else:
        raise TypeError(f"parts: got {shown(parts)}, expected the rows of each part, such as [16000, 16000]")
    if not sizes or min(sizes) < 1 or sum(sizes) != (rows or sum(sizes)):
        raise ValueError(f"parts: got {parts}, expected rows that make up the vocabulary of {rows}")
    return sizes


def _taking_parts(fn: Stage | None, leaves: Sequence[str], parts: int) -> Stage | None:
    """Make a stage that takes leaves in parts from a stage that takes whole leaves."""
    if fn is None or not leaves:
        return fn

    @wraps(fn)
    def stage(params: Any, x: Any, *extras: Any) -> Any:
        return fn(_changed(params, leaves, _joined, "params"), x, *extras)

    note_parts(stage, leaves, parts)
    return stage


def _part(fn: Stage | None, loss: VocabularyLoss, start: int, size: int, vocabulary: int) -> Stage | None:
    """Make a part of the output layer, a stage that takes the target, from the whole layer."""
    if fn is None:
        return None

    @wraps(fn)
    def part(params: Any, x: Any, target: Any) -> Any:
        return loss.partial(_logits(fn(params, x), size), target, start, vocabulary)

    vars(part)[TARGETED] = True
    return part


def _logits(y: Any, rows: int) -> Tensor:
    """Return the only tensor of the result of an output layer with this number of rows."""
    logits = tree_leaves(y)
    if isinstance(y, Output) or [list(t.shape[-1:]) for t in logits] != [[rows]]:
        raise ValueError(
            f"the output layer returned {shown(y)} with parameters of {rows} rows, expected one tensor, the"
            f" logits[..., {rows}]"
        )
    (tensor,) = logits
    return tensor


def _together(params: Any, parts: tuple[Any, ...]) -> tuple[Any, ...]:
    return parts


def _alone(params: Any, part: Any) -> tuple[Any, ...]:
    return (part,)
