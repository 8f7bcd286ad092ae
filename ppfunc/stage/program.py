"""Describe arguments and results of engines: the example and the outline of a stage, and its program.

A program consists of the pure functions that forward and backward of one stage are.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any, NamedTuple, Protocol, Self

import torch

from ppfunc._checks import limited, naming_arguments

from ._torch import FakeTensor, expression, shape_env, size_symbol, storage
from .layout import local
from .signature import LeafSignature, Signature
from .tree import tree_flatten, tree_leaves

Leaves = tuple[torch.Tensor, ...]
Gradients = tuple[torch.Tensor | None, ...]
Stage = Callable[..., Any]
"""``fn(params, x, *extras) -> y``, pure, over trees of tensors; or ``-> Output`` where it returns more than
``y``.
"""
Loss = Callable[[Any, Any], Any]
"""``loss_fn(y, target) -> scalar``, or ``-> (scalar, aux)``, where ``aux`` is a tree of tensors."""


@dataclass(frozen=True, slots=True)
class Example:
    """Describe the arguments of a stage without their values: hashable, a key for programs."""

    params: Signature
    strides: tuple[tuple[int, ...], ...]  # of every parameter, in elements
    x: Signature  # gradients are wanted for its ``grad=True`` leaves
    extras: tuple[Signature, ...]  # which are never differentiated
    device: torch.device  # where the stage computes
    subclasses: tuple[str, ...] = ()  # names of other tensor types than ``Tensor`` and ``Parameter``
    targeted: bool = False  # whether the first extra is the target

    @classmethod
    def of(
        cls, example: tuple[Any, ...], device: torch.device | str | None = None, *, targeted: bool = False
    ) -> Self:
        """Read ``(params, x, *extras)``: signatures, or trees of tensors; of DTensors the parts of this rank.

        The stage computes on ``device``, by default that of the first tensor of the example with values, else
        on the CPU.

        Raises:
            TypeError: no parameters, or no ``x``.
        """
        if len(example) < 2:
            raise TypeError(
                f"got {len(example)} arguments of a stage, expected params, x, and then its extras"
            )
        signatures = [
            Signature.of(tree, name)
            for tree, name in zip(example, _names(len(example), targeted), strict=True)
        ]
        tensors = [local(t) for tree in example if not isinstance(tree, Signature) for t in tree_leaves(tree)]
        if isinstance(example[0], Signature):
            strides = tuple(torch.empty(leaf.shape, device="meta").stride() for leaf in signatures[0].leaves)
        else:
            strides = tuple(local(t).stride() for t in tree_leaves(example[0]))
        held = (t.device for t in tensors if not t.is_meta)
        where = torch.device(device) if device is not None else next(held, torch.device("cpu"))
        plain = (torch.Tensor, torch.nn.Parameter)
        others = tuple(sorted({type(t).__name__ for t in tensors if type(t) not in plain}))
        return cls(signatures[0], strides, signatures[1], tuple(signatures[2:]), where, others, targeted)

    @property
    def signatures(self) -> tuple[Signature, ...]:
        return self.params, self.x, *self.extras

    @property
    def differentiated(self) -> tuple[bool, ...]:
        """Tell of each leaf of the parameters and of ``x`` whether its gradient may be wanted."""
        return tuple(leaf.grad for leaf in (*self.params.with_grad().leaves, *self.x.leaves))

    @property
    def names(self) -> tuple[str, ...]:
        """Name the arguments in errors."""
        return _names(2 + len(self.extras), self.targeted)

    @property
    def paths(self) -> list[str]:
        """Return the paths of the leaves of all arguments, such as ``"params['w']"``."""
        return [
            name + path
            for name, signature in zip(self.names, self.signatures, strict=True)
            for path in signature.paths
        ]

    def __str__(self) -> str:
        return ", ".join(
            f"{name} = {limited(str(signature), 600)}"
            for name, signature in zip(self.names, self.signatures, strict=True)
        )

    @property
    def extra_leaves(self) -> tuple[Any, ...]:
        return tuple(leaf for signature in self.extras for leaf in signature.leaves)

    @property
    def symbols(self) -> tuple[torch.SymInt, ...]:
        """Return the sizes that are symbols."""
        leaves = (*self.x.leaves, *self.extra_leaves)
        return tuple(size for leaf in leaves for size in leaf.shape if isinstance(size, torch.SymInt))

    def unflatten(self, leaves: Iterable[Any]) -> tuple[Any, ...]:
        """Return the arguments with these leaves."""
        rest = iter(leaves)
        return tuple(s.unflatten(islice(rest, len(s.leaves))) for s in self.signatures)

    def make(self) -> tuple[Leaves, Leaves, Leaves]:
        """Make distinct tensors without values for the parameters, for ``x`` and for the extras."""
        params = tuple(
            torch.empty_strided(leaf.shape, stride, dtype=leaf.dtype, device=self.device)
            for leaf, stride in zip(self.params.leaves, self.strides, strict=True)
        )
        x, extras = (
            tuple(torch.empty(leaf.shape, dtype=leaf.dtype, device=self.device) for leaf in leaves)
            for leaves in (self.x.leaves, self.extra_leaves)
        )
        return params, x, extras


def _names(arguments: int, targeted: bool) -> tuple[str, ...]:
    target = ["target"] if targeted else []
    return "params", "x", *target, *(f"extra {n}" for n in range(arguments - 2 - targeted))


@naming_arguments
class Output(NamedTuple):
    """The return value of a stage that returns more than its activation.

    Args:
        y: the activation, as a plain stage returns it.
        loss: an auxiliary loss, a scalar; added to the loss of the last stage, with the weight of the
            microbatch.
        metrics: a tree of tensors for the caller, not differentiated.
        state: the new state of the stage, a tree like the state that it was given.
        skips: values for later stages that are not its neighbours, ``{stage: tree}``.
        carry: a tree for the stage's next slice of the sequence, differentiated as ``y`` is; ``()`` for none.
    """

    y: Any
    loss: Any = None
    metrics: Any = None
    state: Any = None
    skips: Mapping[int, Any] | None = None
    carry: Any = None


WITHOUT_CARRY = "without_carry"
"""The attribute of a stage that cannot take a carry: the name of what has made it."""


TARGETED = "targeted"
"""The attribute of a stage that takes the target of a microbatch after its input, as a loss function does."""


class Carried(NamedTuple):
    """The input of a slice, before it is taken apart for the stage.

    Args:
        x: input of the stage.
        carry: tree of the slice before; None in the first slice of a sequence, unless the step was given it.
    """

    x: Any
    carry: Any


class Received(NamedTuple):
    """The input of a stage at which skip connections end.

    Args:
        x: the activation from the stage before.
        skips: the values of earlier stages that are not its neighbours, ``{stage: tree}``.
    """

    x: Any
    skips: dict[int, Any]


class SeenProgram(NamedTuple):
    """Describe the calls of a stage, equal for equal programs of several ranks.

    Args:
        takes: the arguments of the stage, as text.
        digest: digest of the operators, their arguments by the calls that have made them, and the results.
        constants: the tensors among the arguments that are neither given to the stage nor made by it.
    """

    takes: str
    digest: str
    constants: tuple[torch.Tensor, ...]


class Outline(NamedTuple):
    """Hold the result of evaluating a stage without its values.

    Args:
        y: signature of the output; ``grad=True`` where it depends on a differentiable leaf of the parameters
            or of ``x``.
        aux: signature of the auxiliary output, no leaf of which carries a gradient.
        draws: the number of operators that drew from a random generator.
        untraced: why no trace can repeat it, and what to use instead; None where one can.
        modules: the modules that ran, with their submodules: the stage depends on their train or evaluation
            mode.
        known: whether it always takes the path that was seen; False if it ran on zeros instead.
        lasts: whether it may be kept. False if the stage raised without values and ran on zeros: it may not
            raise again.
        undeclared: parameters that a module has frozen, and of which the step asks for gradients.
        program: the calls of the stage, if they were noted.
    """

    y: Signature
    aux: Signature
    draws: int
    untraced: tuple[str, str] | None = None
    modules: tuple[torch.nn.Module, ...] = ()
    known: bool = True
    lasts: bool = True
    undeclared: tuple[str, ...] = ()
    program: SeenProgram | None = None

    @property
    def random(self) -> bool | None:
        """Tell whether the stage draws random numbers.

        Returns:
            None if a path that was not seen may.
        """
        return True if self.draws else None if not self.known else False


class FlatProgram(NamedTuple):
    """Hold the functions of a stage on flat tuples of tensors; call them under ``torch.no_grad()``.

    Leaves of ``x``, of the extras and of ``gy`` may have any strides; outputs and ``gx`` are
    contiguous, so that a tensor is the same whether it was sent or handed over. Gradients of
    parameters have the strides that their operator gives. What is returned may alias the
    arguments, and parts of it each other: nobody may write into it without owning it. Of a traced program,
    ``fresh`` says that the gradients of the parameters do not.

    A backward drops each residual after its last use. The memory is free at once if the caller
    keeps no reference, as in ``backward.function(slots.pop(key), gy)`` of the graph engine (a call of an
    object keeps its arguments to the end); a caller that keeps one may call again (of the graph engine
    only: the residuals of the other engines serve once).

    Args:
        forward: ``(params, x, extras) -> (outputs, residuals)``: all leaves in order; the outputs
            are the leaves of ``y``, then those of the auxiliary output.
        backward: ``(residuals, gy) -> (gparams, gx)``: ``gy`` has one entry per ``grad=True`` leaf
            of ``y``; ``gparams`` one per floating or complex parameter, ``gx`` one per ``grad=True``
            leaf of ``x``; ``None`` without dependence.
        backward_input: ``(residuals, gy) -> (gx, rest)``.
        backward_weight: ``(rest,) -> gparams``.
    """

    forward: Callable[[Leaves, Leaves, Leaves], tuple[Leaves, tuple[Any, ...]]]
    backward: Callable[[tuple[Any, ...], Leaves], tuple[Gradients, Gradients]]
    backward_input: Callable[[tuple[Any, ...], Leaves], tuple[Gradients, tuple[Any, ...]]]
    backward_weight: Callable[[tuple[Any, ...]], Gradients]


class StageProgram(NamedTuple):
    """The functions of a stage on trees, with the facts that are known of them beforehand. Of DTensors, the
    stage is given the part of its rank.

    Equivalent to, for ``y, pull = torch.func.vjp(fn, params, x)``::

        y, residuals = forward(params, x)
        gparams, gx = backward(residuals, gy)       # pull(gy)
        gx, rest = backward_input(residuals, gy)    # the same gx ...
        gparams = backward_weight(rest)             # ... and the same gparams, apart

    Args:
        forward: ``(params, x, *extras) -> (y, residuals)``, or ``((y, aux), residuals)``.
        backward, backward_input, backward_weight: gradients have the structures of ``params`` and ``x``,
            zeros without dependence, or if no gradient is wanted.
        flat: the same on flat tuples, which the interpreter calls.
        y: signature of the output.
        aux: signature of the auxiliary output.

        random: whether the forward draws random numbers, None where that depends on values; a backward never
            does.
    """

    forward: Callable[..., tuple[Any, tuple[Any, ...]]]
    backward: Callable[[tuple[Any, ...], Any], tuple[Any, Any]]
    backward_input: Callable[[tuple[Any, ...], Any], tuple[Any, tuple[Any, ...]]]
    backward_weight: Callable[[tuple[Any, ...]], Any]
    flat: FlatProgram
    y: Signature
    aux: Signature
    random: bool | None


class Engine(Protocol):
    """Differentiates stages: builds the program of one for an example."""

    def __call__(
        self,
        fn: Callable[..., Any],
        example: tuple[Any, ...],
        *,
        has_aux: bool = False,
        name: str = "the stage",
        device: torch.device | str | None = None,
        outline: Outline | None = None,
    ) -> StageProgram:
        """Build the program of the stage ``fn(params, x, *extras) -> y``.

        Args:
            fn: the stage; with ``has_aux`` it returns ``(y, aux)``.
            example: ``(params, x, *extras)``, trees of tensors or signatures.
            has_aux: whether there is an auxiliary output, which gets no cotangent.
            name: the name of the stage in errors.
            device: the device of the stage; by default that of the first tensor of the example with values.
            outline: an outline of the stage, of the same example; the engine then does not evaluate the stage
                again.

        Raises:
            StageError: the engine cannot serve the stage; says why, and which one can.
        """


def stage_program(flat: FlatProgram, example: Example, outline: Outline, *, has_aux: bool) -> StageProgram:
    """Make the program on trees of a program on flat tuples."""
    y, aux = outline.y, outline.aux
    params = example.params.with_grad()  # of each that can have one

    def fill(signature: Signature, gradients: Gradients) -> Any:
        wanted = iter(gradients)
        pairs = [(leaf, next(wanted) if leaf.grad else None) for leaf in signature.leaves]
        return signature.wrap(
            torch.zeros(leaf.shape, dtype=leaf.dtype, device=example.device) if g is None else g
            for leaf, g in pairs
        )

    def cotangents(gy: Any) -> Leaves:
        leaves, treedef = tree_flatten(gy)
        if treedef != y.treedef:
            raise ValueError(f"gy: got the structure {treedef}, expected that of y, {y.treedef}")
        return tuple(local(g) for g, leaf in zip(leaves, y.leaves, strict=True) if leaf.grad)

    @torch.no_grad()
    def forward(*arguments: Any) -> tuple[Any, tuple[Any, ...]]:
        if len(arguments) != len(example.names):
            raise TypeError(
                f"got {len(arguments) - 2} arguments after x, expected {len(example.extras)}, as in the"
                " example"
            )
        read = [
            s.require(tree, name)
            for s, tree, name in zip(example.signatures, arguments, example.names, strict=True)
        ]
        outputs, residuals = flat.forward(tuple(p.detach() for p in read[0]), read[1], sum(read[2:], ()))
        cut = len(y.leaves)
        out = y.wrap(outputs[:cut])
        return ((out, aux.wrap(outputs[cut:])) if has_aux else out), residuals

    @torch.no_grad()
    def backward(residuals: tuple[Any, ...], gy: Any) -> tuple[Any, Any]:
        gparams, gx = flat.backward(residuals, cotangents(gy))
        return fill(params, gparams), fill(example.x, gx)

    @torch.no_grad()
    def backward_input(residuals: tuple[Any, ...], gy: Any) -> tuple[Any, tuple[Any, ...]]:
        gx, rest = flat.backward_input(residuals, cotangents(gy))
        return fill(example.x, gx), rest

    @torch.no_grad()
    def backward_weight(rest: tuple[Any, ...]) -> Any:
        return fill(params, flat.backward_weight(rest))

    return StageProgram(forward, backward, backward_input, backward_weight, flat, y, aux, outline.random)


def without_aux(loss_fn: Loss) -> Callable[[Any, Any], torch.Tensor]:
    """Wrap a loss function: raise TypeError if it returns ``(loss, aux)``, which no transform carries."""

    def loss(y: Any, target: Any) -> torch.Tensor:
        value = loss_fn(y, target)
        if isinstance(value, tuple):
            raise TypeError(
                "it returned (loss, aux) to a transform, expected the loss; return that alone, or take"
                " ppfunc.value_and_grad"
            )
        return value

    return loss


# -- sizes that vary: one evaluation and one trace serve all for which a stage takes the same path


class Numbers:
    """Puts numbers in the place of symbols: in values, tensors without values, and what they are nested in.

    Args:
        values: numbers by symbol.
    """

    def __init__(self, values: Mapping[Any, int]) -> None:
        self._values, self._known = values, dict[Any, int]()
        self._storages: dict[int | None, Any] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return getattr(value, "_make", type(value))(map(self, value))
        if isinstance(value, torch.SymInt):
            made = expression(value)
            if made not in self._known:
                self._known[made] = int(made.xreplace(self._values))
            return self._known[made]
        if isinstance(value, dict):
            return {k: self(v) for k, v in value.items()}
        if isinstance(value, Example | Signature | LeafSignature):
            return replace(value, **{f.name: self(getattr(value, f.name)) for f in fields(value)})
        return self._tensor(value) if isinstance(value, FakeTensor) else value

    def _tensor(self, like: FakeTensor) -> FakeTensor:
        """Make a tensor that shares memory with others as ``like`` does with theirs."""
        if like.layout is not torch.strided:
            return like
        memory, bare = like.untyped_storage(), torch.empty(0, dtype=like.dtype, device="meta")
        if (key := storage(like)) not in self._storages:
            self._storages[key] = torch.UntypedStorage(self(memory.nbytes()), device="meta")
        bare.set_(self._storages[key], *self((like.storage_offset(), tuple(like.shape), like.stride())))
        return FakeTensor(like.fake_mode, bare, like.device)


class SizeRange:
    """Holds arguments, some sizes of which are symbols, and the decisions by these sizes.

    Args:
        before, now: two forms of the same arguments. Sizes vary that differ, or that varied ``before``; those
            that are equal to each other in both stay equal.

    Attributes:
        trees: ``now``, with symbols for the sizes that vary. They decide as the sizes of ``now`` do.
        symbols: all of them.

    >>> eight, nine, two = (Signature.of(torch.empty(n, 4)) for n in (8, 9, 2))
    >>> lengths = SizeRange([eight], [nine])
    >>> rows, numbers = lengths.trees[0].leaves[0].shape[0], lengths.numbers([two])
    >>> numbers((rows * 3, "text")), bool(rows > 5), lengths.numbers([two])
    ((6, 'text'), True, None)
    """

    def __init__(self, before: Sequence[Signature], now: Sequence[Signature]) -> None:
        self._env, self._known = shape_env(), dict[tuple[str, int], Any]()
        leaves = [tuple(map(self._leaf, a.leaves, b.leaves)) for a, b in zip(before, now, strict=True)]
        self.trees = tuple(replace(tree, leaves=each) for tree, each in zip(now, leaves, strict=True))
        self.symbols = [*self._known.values()]
        self._names = [*map(expression, self.symbols)]
        self._decided = -1, "True"  # how often, and the conditions

    def _leaf(self, before: LeafSignature, now: LeafSignature) -> LeafSignature:
        return replace(now, shape=tuple(map(self._size, before.shape, now.shape)))

    def _size(self, before: Any, now: int) -> Any:
        if now < 2 or (isinstance(before, int) and before == now):
            return now  # operators have ways of their own with 0 and 1
        key = str(before), now
        if key not in self._known:
            self._known[key] = size_symbol(self._env, now, f"size{len(self._known)}")
        return self._known[key]

    def numbers(self, trees: Sequence[Signature]) -> Numbers | None:
        """Return the numbers of arguments of the same structure.

        Returns:
            None where they would decide otherwise.
        """
        values: dict[int, int] = {}
        for ours, theirs in zip(_sizes(self.trees), _sizes(trees), strict=True):
            expected = ours if isinstance(ours, int) else values.setdefault(id(ours), theirs)
            if expected != theirs:
                return None
        given, decided = [values[id(size)] for size in self.symbols], len(self._env.guards)
        if self._decided[0] != decided:
            text = self._env.produce_guards_expression(self.symbols, ignore_static=False)
            self._decided = decided, text or "True"
        if min(given) < 2 or not self._env.evaluate_guards_expression(self._decided[1], given):
            return None
        return Numbers(dict(zip(self._names, given, strict=True)))


def _sizes(trees: Sequence[Signature]) -> list[Any]:
    return [size for tree in trees for leaf in tree.leaves for size in leaf.shape]
