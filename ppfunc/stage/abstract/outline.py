"""Evaluate stages without values, to learn their outputs and effects; then each is a function of its
differentiable leaves, for every engine.
"""

import inspect
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from hashlib import sha256
from types import CodeType
from typing import Any

import torch
from optree import PyTreeSpec

from .._torch import (
    ASSIGNS_DATA,
    BackwardCFunction,
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    UnsupportedOperatorException,
    awaited,
    dtensor_class,
    estimate,
    function_of,
    is_wrapped,
    part_of,
    schema,
    storage,
    version,
)
from ..errors import StageError, by_dtensor, line_of, other_engine, raised
from ..frozen import noting_undeclared
from ..layout import LAY_OTHERWISE, Boundary, local
from ..operators import draws, tensors_in
from ..process import hold_interrupts, without_foreign_draws
from ..program import (
    Carried,
    Example,
    FlatProgram,
    Gradients,
    Leaves,
    Outline,
    Received,
    SeenProgram,
    StageProgram,
    stage_program,
)
from ..signature import LeafSignature, Signature, differentiable, flatten
from ..tree import filled, tree_flatten, tree_structure
from .captures import Watch
from .evaluation import (
    DATA_DEPENDENT,
    NoValuesError,
    data_dependence,
    in_python,
    quiet,
    require_values,
    stand_ins,
    without_values,
)
from .purity import LogicalDraws, Purity, WithoutCudnn


class SeenFunctions(torch.overrides.TorchFunctionMode):
    """Watches assignments to ``data``, which operators do not see."""

    assigns, looks_on = False, True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.assigns |= func == ASSIGNS_DATA
        return func(*args, **(kwargs or {}))


def outline(
    fn: Callable[..., Any],
    example: tuple[Any, ...],
    *,
    has_aux: bool = False,
    name: str = "the stage",
    device: torch.device | str | None = None,
    noting: bool = False,
    watches: Sequence[Watch] = (),
) -> Outline:
    """Evaluate a stage without values; where it needs them, run it once, on a batch that is here or on zeros.

    Args:
        fn: a stage, ``fn(params, x, *extras) -> y``; with ``has_aux`` it returns ``(y, aux)``.
        example: ``(params, x, *extras)``, signatures, or trees of tensors, which may be on ``meta``.
        has_aux: whether there is an auxiliary output.
        name: the name of the stage in errors.
        device: the device of the stage; by default that of the first tensor of the example with values,
            else the CPU.
        noting: whether to note its calls, which takes up to 0.8 of the time again.
        watches: watches of its reads beside its arguments; they take what has changed. Made here by default.

    Returns:
        The outline; ``known`` is False where the stage ran on zeros, because of tensor subclasses or because
        control flow or shapes depend on values.

    Raises:
        StageError: the stage raises, is not pure, keeps a tensor that it makes, changes a number elsewhere,
            or draws from another generator than torch's default one.
        TypeError: a leaf is not a tensor.

    >>> dropped = lambda w, x: torch.nn.functional.dropout(x @ w)
    >>> outline(dropped, (torch.zeros(2, 3), torch.zeros(5, 2))).random
    True
    """
    watches = watches or [Watch((getattr(fn, "fn", fn), getattr(fn, "loss_fn", None)))]
    before = [watch.state() for watch in watches]
    evaluation = _outline(fn, example, has_aux, name, device, noting)
    for watch, then, modules in zip(watches, before, (evaluation.modules, ()), strict=False):
        watch.settle(then, modules, name)
    return evaluation


def _outline(
    fn: Callable[..., Any],
    example: tuple[Any, ...],
    has_aux: bool,
    name: str,
    device: torch.device | str | None,
    noting: bool,
) -> Outline:
    seen, failure = Example.of(example, device, targeted=getattr(fn, "targeted", False)), None
    if seen.subclasses:
        untraced = (
            f"its example has tensors of the types {', '.join(seen.subclasses)}, which are not traced",
            other_engine("eager"),
        )
    else:
        evaluate = partial(without_foreign_draws, partial(_evaluate, fn, seen, has_aux, name, noting), name)
        try:
            return evaluate()
        except DATA_DEPENDENT as error:
            engine = "eager" if isinstance(error, UnsupportedOperatorException) else "functional"
            untraced = data_dependence(error), other_engine(engine)
        except StageError as error:
            if error.__cause__ is None or seen.symbols:
                raise
            try:
                evaluate()
            except (StageError, *DATA_DEPENDENT):
                untraced, failure = (f"without values {error.reason}", other_engine("eager")), error
            else:  # an error of the first call alone is no refusal of tensors without values
                raise

    if seen.symbols:
        raise StageError(name, *untraced)
    try:
        zeros = stand_ins(example, seen.device)
        observe = partial(_observe, fn, seen, zeros, has_aux, name, noting, abstract=False, after=failure)
        with hold_interrupts():
            on_zeros = without_foreign_draws(observe, name, repeatable=False)  # it may wait for other ranks
        # Another path than that of zeros may depend on what this one does not.
        y = on_zeros.y.with_grad() if any(seen.differentiated) else on_zeros.y
        return on_zeros._replace(y=y, untraced=untraced, known=False, lasts=failure is None)
    except StageError as error:
        first = failure if failure is not None and error.__cause__ is not None else error
        raise first from first.__cause__


def _evaluate(fn: Callable[..., Any], example: Example, has_aux: bool, name: str, noting: bool) -> Outline:
    before = torch.default_generator.get_state()
    try:
        with without_values(example.symbols):
            return _observe(fn, example, example.make(), has_aux, name, noting, abstract=True)
    finally:
        torch.default_generator.set_state(before)


def _observe(
    fn: Callable[..., Any],
    example: Example,
    tensors: tuple[Leaves, Leaves, Leaves],
    has_aux: bool,
    name: str,
    noting: bool,
    *,
    abstract: bool,
    after: StageError | None = None,
) -> Outline:
    """Call the stage; raise ``StageError`` if it is not pure or draws from a generator of its own."""
    flags = (*example.differentiated, *(False for _ in tensors[2]))
    with torch.enable_grad():
        # Clones, since autograd refuses writes into leaves in its own words.
        arguments = [t.requires_grad_(grad).clone() for t, grad in zip(sum(tensors, ()), flags, strict=True)]
        trees = example.unflatten(arguments)
        with (
            Purity(name, zip(example.paths, arguments, strict=True), abstract, after) as purity,
            SeenCalls(zip(example.paths, arguments, strict=True), map(estimate, example.symbols))
            if noting  # for ranks with peers
            else nullcontext() as seen,
            SeenFunctions() as functions,
            modules_that_run() as modules,
            noting_undeclared() as undeclared,
        ):
            out = _call(fn, trees, example, name, abstract)
        (y, y_def), (aux, aux_def) = split_aux(out, has_aux, name)
    require_values(map(local, y + aux), name)
    _require_unchanged(example, trees, arguments, name)
    program, untraced = None, None
    if seen is not None:
        program = seen.ended(y + aux, _own_histories([t.grad_fn for t in y if t.grad_fn]))
    if functions.assigns:
        reason = "it assigns to the data of a tensor, which is not traced"
        untraced = reason, f"make a new tensor, or {other_engine('eager')}"
    elif purity.seeds:
        reason = "it seeds the generator that it draws from, which is not traced"
        untraced = reason, other_engine("functional")
    return Outline(
        Signature(y_def, tuple(LeafSignature.of(t, t.requires_grad) for t in y)),
        Signature(aux_def, tuple(LeafSignature.of(t, False) for t in aux)),
        purity.draws,
        untraced,
        tuple(modules.values()),
        undeclared=tuple(dict.fromkeys(undeclared)),
        program=program,
    )


@contextmanager
def modules_that_run() -> Iterator[dict[int, torch.nn.Module]]:
    """Record, by identity, the modules that this thread calls, and their submodules."""
    modules: dict[int, torch.nn.Module] = {}
    thread = threading.get_ident()

    def note(module: torch.nn.Module, args: Any) -> None:
        if threading.get_ident() == thread and id(module) not in modules:
            modules.update((id(part), part) for part in module.modules())

    vars(note)["looks_on"] = True
    hook = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield modules
    finally:
        hook.remove()


def _call(fn: Callable[..., Any], trees: tuple[Any, ...], example: Example, name: str, abstract: bool) -> Any:
    """Call ``fn(*trees)``; name the line that raised, and the arguments."""
    try:
        with quiet(), in_python():
            return fn(*trees)
    except NoValuesError as error:
        raise error.of_stage(name) from None
    except (StageError, *DATA_DEPENDENT):
        raise
    except Exception as error:
        if by_dtensor(error):
            raise StageError(
                name,
                "it uses DTensors, whose own functions torch.func cannot transform",
                "write it over ppfunc.collectives.psum and its siblings, or take ppfunc.value_and_grad",
            ) from error
        zeros = (
            ""
            if abstract
            else ", and zeros where no batch is here, by which an untraced engine learns what it returns"
        )
        of_form = isinstance(error, (RuntimeError, ValueError))
        mend = LAY_OTHERWISE if of_form and Boundary.of(getattr(fn, "fn", fn)).params else ""
        if isinstance(error, TypeError) and len(example.extras) > example.targeted:
            mend = "where the stage takes no extra, leave it out of extras= and state= of the step"
        elif "positional argument" in str(error) and not line_of(error):  # of the stage itself
            mend = (
                "a stage is called as fn(params, x), a module as forward(x), with one argument more for a"
                " carry of slices, for each extra, and for its state; the loss function alone takes targets:"
                " further labels are extras={stage: labels} of a step"
            )
        elif not mend and len(trees) > 1:
            mend = next((text for kind, text in _GIVEN.items() if type(trees[1]) is kind), "")
        raise StageError(name, f"{raised(error)}; it was given {example}{zeros}", mend) from error


_GIVEN = {
    Received: (
        "read Received(x, skips={source: value}), which a stage gets to which skip connections lead; a value"
        " is None for a microbatch that does not go through the source"
    ),
    Carried: "take None for the carry of the first slice, or give the step one, carry={stage: Microbatches}",
    tuple: (
        "read x as the tuple of the outputs of several stages, whose edges lead here, or of the inputs as"
        " they were given; targets are an argument beside the inputs"
    ),
}
"""By the type of what a stage gets in the place of one tensor: how to read it."""


def split_aux(out: Any, has_aux: bool, stage: str) -> tuple[tuple[Any, PyTreeSpec], tuple[Any, PyTreeSpec]]:
    """Flatten the result of a stage into leaves and structure of ``y``, and of ``aux`` if there is any."""
    if not has_aux:
        return flatten(out, f"{stage} y"), ((), tree_structure(None))
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(
            f"{stage} has an auxiliary output: got {type(out).__name__}, expected the pair (y, aux)"
        )
    return flatten(out[0], f"{stage} y"), flatten(out[1], f"{stage} aux")


def _require_unchanged(
    example: Example, trees: tuple[Any, ...], arguments: list[torch.Tensor], name: str
) -> None:
    """Raise if the stage replaced something in the containers of its arguments."""
    before = iter(arguments)
    for what, tree, signature in zip(example.names, trees, example.signatures, strict=True):
        leaves, treedef = tree_flatten(tree)
        if treedef != signature.treedef or any(leaf is not next(before) for leaf in leaves):
            raise StageError(
                name,
                f"it is not pure: it replaces entries of its argument {what}",
                "return the new value, or work on a clone",
            )


def _own_histories(ahead: list[Any]) -> Iterator[Any]:
    """Yield the histories that Functions of the user have made, among these and all behind them."""
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        kind = function_of(node) if isinstance(node, BackwardCFunction) else None
        if kind and not kind.__module__.startswith(("torch.", "ppfunc.")):
            yield node
        new = {below for below, _ in node.next_functions if below} - seen
        seen |= new
        ahead += new


# -- a stage as a function of its differentiable leaves, for every engine

_outline_of = outline  # which an argument of an engine hides


def contiguous(tensors: Iterable[torch.Tensor | None]) -> tuple[Any, ...]:
    """Return the tensors as they would arrive over a wire: contiguous, without lazy conjugation.

    In process and between processes this gives the same bits. None, the absence of a gradient, stays.

    Results of functional collectives are waited for.

    >>> contiguous([torch.zeros(2, 3).T])[0].stride()
    (2, 1)
    """
    return tuple(None if t is None else awaited(t).resolve_conj().resolve_neg().contiguous() for t in tensors)


def engine(build: Callable[..., FlatProgram]) -> Callable[..., StageProgram]:
    """Make an engine of ``build(stage, example, **options) -> program``."""

    @wraps(build)
    def program_of(
        fn: Callable[..., Any] | None = None,
        example: tuple[Any, ...] | None = None,
        *,
        has_aux: bool = False,
        name: str = "the stage",
        device: torch.device | str | None = None,
        outline: Outline | None = None,
        **options: Any,
    ) -> StageProgram:
        if fn is None or example is None:
            missing = " and ".join(n for n, value in (("'fn'", fn), ("'example'", example)) if value is None)
            engine, text = (
                build.__name__.lstrip("_"),
                f"missing the argument {missing}, a stage and its example",
            )
            if engine != "graph":
                text = (
                    f"got {', '.join(options) or 'no arguments'}, and it has no options: give"
                    f" engine=ppfunc.engines.{engine} itself, or ppfunc.engines.graph(remat=..., compile=...)"
                )
            raise TypeError(f"{engine}: {text}")
        described = Example.of(example, device, targeted=getattr(fn, "targeted", False))
        outline = outline or _outline_of(fn, example, has_aux=has_aux, name=name, device=device)
        stage = DifferentiableStage(fn, described, outline, has_aux, name)
        with hold_interrupts():
            flat = build(stage, example, **options)
        return stage_program(flat, described, stage.outline, has_aux=has_aux)

    return program_of


class DifferentiableStage:
    """Reduces a stage to a function of its differentiable leaves; all other leaves are bound beforehand."""

    def __init__(
        self, fn: Callable[..., Any], example: Example, outline: Outline, has_aux: bool, name: str
    ) -> None:
        self.fn, self.example, self.outline, self.has_aux, self.name = fn, example, outline, has_aux, name
        self.param_at = [i for i, leaf in enumerate(example.params.leaves) if differentiable(leaf.dtype)]
        self.x_at = [i for i, leaf in enumerate(example.x.leaves) if leaf.grad]
        self.y_at = [i for i, leaf in enumerate(outline.y.leaves) if leaf.grad]

    def primals(self, params: Leaves, x: Leaves) -> tuple[Leaves, Leaves]:
        return tuple(params[i] for i in self.param_at), tuple(x[i] for i in self.x_at)

    def with_others(
        self, params: Leaves, x: Leaves, extras: Leaves
    ) -> Callable[[Leaves, Leaves], tuple[Leaves, Leaves]]:
        """Bind all other leaves: ``(primal params, primal x) -> (y leaves with gradient, all outputs)``."""

        def run(primal_params: Leaves, primal_x: Leaves) -> tuple[Leaves, Leaves]:
            p, a = filled(params, self.param_at, primal_params), list(x)
            for i, value in zip(self.x_at, primal_x, strict=True):
                # Autocast casts a leaf once: gradients of its uses would be summed in half precision.
                a[i] = value.view_as(value) if value.dtype == torch.float32 else value
            mode: AbstractContextManager[Any] = LogicalDraws() if self.outline.draws else nullcontext()
            if not self.outline.known:  # it may take another path than the one seen
                mode = Purity(self.name, zip(self.example.paths, params + x + extras, strict=True))
            with mode:
                out = self._call(self.example.unflatten((*p, *a, *extras)))
            (y, y_def), (aux, _) = split_aux(out, self.has_aux, self.name)
            y, aux = tuple(map(local, y)), tuple(map(local, aux))
            self.require_same(y, aux, y_def)
            y = contiguous(y)
            return tuple(y[i] for i in self.y_at), y + contiguous(aux)

        return run

    def _call(self, trees: tuple[Any, ...]) -> Any:
        """Call the stage. An exception gets a note with the stage, the line and the arguments."""
        recurrent = any(isinstance(module, torch.nn.RNNBase) for module in self.outline.modules)
        by_cudnn = recurrent and self.example.device.type == "cuda"
        try:
            with WithoutCudnn() if by_cudnn else nullcontext(), in_python():
                return self.fn(*trees)
        except NoValuesError as error:
            raise error.of_stage(self.name) from None
        except StageError:
            raise
        except Exception as error:
            error.add_note(f"raised in {self.name}{line_of(error)}, which was given {self.example}")
            raise

    @contextmanager
    def unchanged(self, params: Leaves, x: Leaves, extras: Leaves) -> Iterator[None]:
        """Raise if a call in this context writes into its arguments. Their version counters tell."""
        arguments = params + x + extras
        before = [version(t) for t in arguments]
        yield
        written = [
            n for n, (t, count) in enumerate(zip(arguments, before, strict=True)) if version(t) != count
        ]
        if written:
            raise StageError(
                self.name,
                f"it is not pure: it has written into its argument {self.example.paths[written[0]]}, whose"
                " values are others now",
                "return the new value, or work on a clone",
            )

    def dense(self, gradients: Gradients) -> Gradients:
        """Wait for gradients of the parameters that are results of collectives. Raise if one is sparse."""
        for at, gradient in zip(self.param_at, gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise StageError(
                    self.name,
                    f"the gradient of params{self.example.params.paths[at]} is a {str(gradient.layout)[6:]}"
                    " tensor, expected a dense one",
                    "leave out sparse=True",
                )
        return tuple(None if t is None else awaited(t) for t in gradients)

    def no_gradients(self, gy: Leaves, **_: Any) -> tuple[Gradients, Gradients]:
        """Run the backward of a stage through which no gradient flows."""
        return (None,) * len(self.param_at), (None,) * len(self.x_at)

    def require_same(self, y: Leaves, aux: Leaves, treedef: Any) -> None:
        """Raise unless ``y`` has the form of the outline, and all outputs have values."""
        require_values(y + aux, self.name)
        want = self.outline.y
        same = treedef == want.treedef and all(
            tuple(t.shape) == s.shape and t.dtype == s.dtype for t, s in zip(y, want.leaves, strict=True)
        )
        if not same:
            got = [f"{t.dtype}{list(t.shape)}" for t in y]
            raise StageError(
                self.name,
                f"its output depends on values in structure or shape: got {got}, expected {want}",
                "return the same shapes for every microbatch, by padding for instance",
            )


# -- the program of a stage, for ranks to compare


_PLAIN = (
    bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format, type(None), torch.SymInt,
    torch.SymFloat,
)  # fmt: skip


_NAME = re.compile("\0.*?\0")  # of a tensor, in the text of a call
_NUMBER = re.compile("\0\\d+\0")  # of the call that has made it


class SeenCalls(TorchDispatchMode):
    """Watches the operators of one evaluation of a stage, for ranks that hold the same stage to compare.

    Operators, attributes and shapes are noted. Left out is what may differ where the program is the same:
    names of groups, numbers of devices, paths.

    Args:
        arguments: the tensors that the stage is given, by their paths.
        sizes: sizes for which the symbols of the arguments stand.
    """

    supports_higher_order_operators = True

    def __init__(self, arguments: Iterable[tuple[str, torch.Tensor]], sizes: Iterable[int] = ()) -> None:
        super().__init__()
        arguments = list(arguments)
        self._names = {storage(t): f"\0{path}\0" for path, t in arguments}
        self._held: list[Any] = [arguments]  # no later tensor takes the memory of one that has a name
        self._takes = self._text([*(t for _, t in arguments), *sizes], [])
        # Texts and constants, with the names of the results, and whether a call counts if nothing reads them.
        self._calls: list[tuple[str, list[torch.Tensor], set[str], bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, operator = kwargs or {}, schema(func) if isinstance(func, OpOverload) else None
        names = [a.name for a in operator.arguments] if operator else []
        given = [value for n, value in enumerate(args) if names[n : n + 1] != ["group_name"]]
        named = [(name, value) for name, value in sorted(kwargs.items()) if name != "group_name"]
        constants: list[torch.Tensor] = []
        text = str(func) + ("" if torch.is_grad_enabled() else " without gradient")
        text += self._text(given + named, constants)
        results = func(*args, **kwargs)
        self._held.append(results)
        number = f"\0{len(self._calls)}\0"
        made = {self._names.setdefault(storage(t), number) for t in tensors_in(results)}
        counts = operator is None or not operator.returns or draws(func, args, kwargs)
        self._calls.append((f"{' '.join(sorted(made))} = {text}", constants, made, counts))
        return results

    def ended(self, results: Sequence[torch.Tensor], functions: Iterable[Any]) -> SeenProgram:
        """Return the calls that results depend on, the backwards of the user's own Functions, the results.

        What nothing depends on may differ: a mesh looks up the place of this rank by operators.
        """
        constants: list[torch.Tensor] = []
        used = [self._text(results, constants), *sorted(map(_backward_of, functions))]
        needed = set(_NAME.findall(used[0]))
        for text, held, made, counts in reversed(self._calls):
            if counts or made & needed:
                needed.update(_NAME.findall(text))
                used.append(text)
                constants += held
        numbers: dict[str, str] = {}
        text = _NUMBER.sub(lambda name: numbers.setdefault(name[0], f"%{len(numbers)}"), "\n".join(used))
        digest = sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
        return SeenProgram(self._takes, digest, tuple(constants))

    def _text(self, value: Any, constants: list[torch.Tensor]) -> str:
        """Write an argument; add to ``constants`` tensors neither given to the stage nor made by it."""
        if isinstance(value, list | tuple):
            return f"({', '.join([self._text(inner, constants) for inner in value])})"
        if isinstance(value, torch.device):
            return value.type
        if not isinstance(value, torch.Tensor):
            return repr(value) if isinstance(value, _PLAIN) else type(value).__name__
        grad = " with gradient" if value.requires_grad else ""
        tensor = part_of(value) if isinstance(value, dtensor_class()) else value
        kind = f"{str(tensor.dtype)[6:]}{grad}"
        if tensor.layout is not torch.strided or tensor.is_nested or is_wrapped(tensor):
            return kind
        name = self._names.get(storage(tensor), "constant")
        if name == "constant" and not isinstance(tensor, FakeTensor):
            constants.append(tensor)
        return f"{name}: {kind}{list(tensor.shape)} {tensor.stride()} + {tensor.storage_offset()}"


def _backward_of(node: Any) -> str:
    """Describe the backward of an ``autograd.Function``: its code, and the numbers that its forward keeps."""
    cls = function_of(node)
    numbers = {
        name: kept
        for name, kept in sorted(vars(node).items())
        if isinstance(kept, int | float | torch.SymInt | torch.SymFloat)
    }
    code = getattr(inspect.unwrap(cls.backward), "__code__", None)
    return f"backward of {cls.__qualname__} {numbers} {'' if code is None else _code(code)}"


def _code(code: CodeType) -> str:
    """Write a code object without places in files."""
    constants = [
        _code(c) if isinstance(c, CodeType) else repr(sorted(map(repr, c)) if isinstance(c, frozenset) else c)
        for c in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {constants}"
