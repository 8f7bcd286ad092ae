"""Write for people: what is wrong with an argument or a name, what would be right, and values as tables."""

import inspect
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dis import opname
from functools import wraps
from math import inf
from numbers import Real
from types import UnionType
from typing import Any, NoReturn, ParamSpec, TypeVar, Union, get_args, get_origin

P = ParamSpec("P")
R = TypeVar("R")


def require_type(name: str, value: Any, kind: Any, expected: str) -> None:
    """Check the type of the argument ``name``.

    Raises:
        TypeError: it is not; the message has the name, the value and ``expected``.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name}: got {shown(value)}, expected {expected}")


def require_one_of(name: str, got: Any, known: Sequence[str]) -> None:
    """Raise ValueError for an option with an unknown name; suggest the nearest."""
    if got not in known:
        near = suggestion(got, known) if isinstance(got, str) else ""
        raise ValueError(f"{name}: got {got!r}, expected {' or '.join(map(repr, known))}{near}")


def require_counts(least: int = 1, /, **counts: object) -> None:
    """Check that every count, of ranks, stages, layers or microbatches, is an integer of at least ``least``.

    Args:
        least: the smallest count that makes sense.
        counts: the counts, by the names of the arguments that they were passed as.

    Raises:
        ValueError: one is not; says which.
    """
    for name, got in counts.items():
        if isinstance(got, bool) or not isinstance(got, int) or got < least:
            number = isinstance(got, float | int | str | None)
            stages = callable(got) or isinstance(got, list | tuple)
            model = "; models and stages go to pp.value_and_grad(stages, loss_fn, schedule)" if stages else ""
            raise ValueError(
                f"{name} = {repr(got) if number else shown(got)}, expected an integer of at least {least}:"
                f" pass {name}={least} or more{model}"
            )


def require_index(name: str, value: object, count: int) -> None:
    """Check that the argument ``name`` is the number of a rank or a stage.

    Raises:
        ValueError: it is no integer from 0 to ``count`` - 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise ValueError(f"{name}: got {value!r}, expected a number from 0 to {count - 1}")


def require_stages(name: str, value: Iterable[int], count: int) -> set[int]:
    """Check that the argument ``name`` holds stages, numbers below ``count``; return them.

    Raises:
        TypeError: it is not iterable.
        ValueError: an item is not a stage.
    """
    require_type(name, value, Iterable, "stages, such as [0, 1]")
    stages = list(value)
    for stage in stages:
        require_index(name, stage, count)
    return set(stages)


def require_real(name: str, number: Any, mend: str = "") -> None:
    """Raise TypeError unless this is a number, finite or not."""
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(f"{name} is {shown(number)}, expected a number{mend}")


def require_number(name: str, number: Any, least: float = 0.0, below: float = inf, mend: str = "") -> None:
    """Require a finite number of at least ``least``, less than ``below``.

    Raises:
        TypeError: no number.
        ValueError: another number.

    >>> require_number("betas[0]", 1.0, below=1.0)
    Traceback (most recent call last):
    ValueError: betas[0] is 1.0, expected a number of at least 0 and less than 1
    """
    require_real(name, number, mend)
    if not least <= float(number) < below:
        wanted = "a finite number" if below == inf else "a number"
        limit = "" if below == inf else f" and less than {below:g}"
        raise ValueError(f"{name} is {number}, expected {wanted} of at least {least:g}{limit}{mend}")


def require_positive(**numbers: Any) -> None:
    """Raise TypeError or ValueError unless these are finite numbers of more than 0."""
    for name, number in numbers.items():
        require_real(name, number)
        if not 0 < number < inf:
            raise ValueError(f"{name} is {number}, expected a finite number of more than 0")


_ELSEWHERE = {
    "at": "stages num_stages n_stages",
    "cap": "memory max_memory",
    "compute": "dtype bf16 fp16",
    "context": "cp sp",
    "data": "dp",
    "experts": "ep",
    "init": "init_scale",
    "load": "resume restore",
    "memory_analysis": "memory memory_stats",
    "microbatches": "num_microbatches n_microbatches",
    "model": "tp tensor",
    "optimizer": "lr learning_rate",
    "per_sample_grad": "vmap",
    "pipe": "pp",
    "precision": "dtype bf16 fp16 amp mixed_precision",
    "psum": "all_reduce",
    "psum_scatter": "reduce_scatter",
    "remat": "recompute activation_checkpointing",
    "schedule": "gradient_accumulation_steps microbatches num_microbatches",
    "seed": "rng key generator",
    "sequences": "microbatches num_microbatches",
    "step": "train fit train_batch",
    "update": "apply apply_updates",
    "value_and_grad": "grad",
    "ppfunc.checkpoint.save": "save save_checkpoint state_dict",
    "ppfunc.checkpoint.load": "load load_checkpoint load_state_dict",
    "ppfunc.integrations.transformers": "PipelineTrainer",
    "ppfunc.schedule.to_svg": "draw plot render show to_svg visualize",
    "ppfunc.optim.clip_by_global_norm": "clip_grad_norm max_grad_norm gradient_clipping",
}
"""Names of other libraries, by the names here; whole names of another module answer anywhere."""


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return ``; did you mean ...?`` for the name among ``names`` that means the same, or is most similar.

    >>> suggestion("shwo", ["show", "check"]), suggestion("onef1b", ["one_f_one_b", "seq1f1b"])
    ("; did you mean 'show'?", "; did you mean 'one_f_one_b'?")
    """
    import difflib  # here, because it is needed for errors only

    letters, by_letters = _letters(name), {_letters(other): other for other in names}
    near = [ours for ours, theirs in _ELSEWHERE.items() if letters in map(_letters, theirs.split())]
    near = [ours for ours in near if "." in ours or ours in by_letters.values()]
    near += [by_letters[alike] for alike in difflib.get_close_matches(letters, by_letters, n=1)]
    return f"; did you mean {near[0]!r}?" if near else ""


def _letters(name: str) -> str:
    return name.lower().replace("_", "").replace("1", "one")


def naming_attributes(kind: type[R]) -> type[R]:
    """Decorate a class: an unknown attribute of its objects is answered by the nearest name, or by all."""

    def refuse(thing: R, name: str) -> Any:
        try:
            return object.__getattribute__(thing, name)  # a property may have raised
        except AttributeError as error:
            if name.startswith("_") or error.obj is not thing or error.name != name:
                raise
            names = [each for each in dir(thing) if not each.startswith("_")]
            near = suggestion(name, names) or f"; it has {', '.join(names)}"
        raise AttributeError(f"{type(thing).__name__} has no attribute {name!r}{near}", name=name)

    setattr(kind, "__getattr__", refuse)  # noqa: B010  # type checkers still refuse unknown names
    return kind


def not_copied(kind: str, mend: str) -> Callable[..., NoReturn]:
    """Make the ``__reduce__`` of an object that is bound to its process: copies and pickles raise TypeError.

    Args:
        kind: noun for the object, with its article.
        mend: action to take instead, in words.
    """

    def refuse(self: object) -> NoReturn:
        raise TypeError(f"{kind} cannot be copied, pickled or sent to a process: {mend}")

    return refuse


def naming_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function or a class: Python's own errors for wrong arguments say what would be right.

    An unknown or a missing argument is answered by the names of all; an error inside, of an argument that is
    not as it is annotated, by the name of that argument. Arguments for True or False are nothing else.
    """
    if isinstance(function, type):
        maker = "__new__" if issubclass(function, tuple) else "__init__"
        setattr(function, maker, naming_arguments(getattr(function, maker)))
        return function
    flags = {n for n, kind in getattr(function, "__annotations__", {}).items() if kind in (bool, "bool")}

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in flags.intersection(kwargs):
            require_type(name, kwargs[name], bool, "True or False")
        try:
            return function(*args, **kwargs)
        except (TypeError, AttributeError) as error:
            if _by_statement(error):
                raise  # it says what is wrong
            signature = inspect.signature(function)
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:
                raise TypeError(with_arguments(str(error), function)) from None
            for name, value in given.items():
                if not _fits(value, kind := signature.parameters[name].annotation):
                    expected = re.sub(r"\b\w+\.(?=\w)", "", inspect.formatannotation(kind))
                    raise TypeError(f"{name}: got {shown(value)}, expected {expected}") from error
            raise

    return call


def _by_statement(error: Exception) -> bool:
    """Tell whether a ``raise`` statement raised an error, and not Python itself."""
    at = error.__traceback__
    while at and at.tb_next:
        at = at.tb_next
    return at is None or opname[at.tb_frame.f_code.co_code[at.tb_lasti]] == "RAISE_VARARGS"


def _fits(value: Any, kind: Any) -> bool:
    """Tell whether a value, and its items, are as annotated; an annotation that is no class fits all."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in inner)
    if (
        origin in (Any, inspect.Parameter.empty)
        or not isinstance(origin, type)
        or getattr(origin, "_is_protocol", False)
    ):
        return True
    if not isinstance(value, Real if origin is float else origin):
        return False
    items = value if inner and isinstance(value, Sequence) and origin is not tuple else ()
    return all(_fits(item, inner[0]) for item in items)


def with_arguments(error: str, function: Callable[..., Any]) -> str:
    """Complete the text of Python's TypeError for wrong arguments: add the nearest name, and all names.

    Names of arguments that have no place end in ``=``.

    >>> with_arguments("got an unexpected keyword argument 'target'", lambda params, inputs, targets: 0)
    "got an unexpected keyword argument 'target'; did you mean 'targets'?; it takes params, inputs, targets"
    """
    parameters = inspect.signature(function).parameters.values()
    names = {
        each.name: f"{each.name}=" if each.kind is each.KEYWORD_ONLY else each.name
        for each in parameters
        if each.name not in ("self", "_cls")
    }
    unknown = re.search(r"unexpected keyword argument '(\w+)'", error)
    twice = re.search(r"multiple values for argument '(\w+)'", error)
    near = (
        suggestion(unknown[1], names)
        if unknown
        else f", which those before it give already: write {twice[1]}= alone"
        if twice
        else ""
    )
    error = re.sub(r"\S+<locals>\.|\b_\w+\.(?!_)|\.__(new|init)__", "", error)  # what made it
    return f"{error}{near}; it takes {', '.join(names.values()) or 'no arguments'}"


def shown(thing: Any) -> str:
    """Write a value, abridged and in one line, with its type.

    >>> shown(2.5)
    '2.5 of type float'
    """
    return f"{limited(' '.join(reprlib.repr(thing).splitlines()), 200)} of type {type(thing).__name__}"


def limited(text: str, most: int = 2000) -> str:
    """Cut a foreign text, which may be very long, to ``most`` characters.

    >>> limited("x" * 20_000_000, 3)
    'xxx... (19999997 more characters)'
    """
    return text if len(text) <= most else f"{text[:most]}... ({len(text) - most} more characters)"


_LINES, _COLUMNS = 32, 120  # of what is shown unasked


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return lines of cells, right-aligned: integers whole, other numbers in four digits, None as a blank.

    >>> print(table(["stage", "forward"], [[0, 1], [1, 0.123456]]))
    stage  forward
        0        1
        1   0.1235
    """
    lines = [list(head), *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    )


def _cell(value: Any) -> str:
    if value is None or isinstance(value, str | int):
        return "" if value is None else str(value)
    return f"{float(value):.4g}"


_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def duration(seconds: float, most: float | None = None) -> str:
    """Write seconds in four digits, in the unit that suits ``most`` seconds, by default these.

    >>> duration(0.271949), duration(0.271949, most=3), duration(4.2e-5)
    ('271.9 ms', '0.2719 s', '42 µs')
    """
    least = float(seconds if most is None else most)
    unit, name = next((unit for unit in _UNITS if least >= unit[0]), _UNITS[-1])
    value = float(seconds) / unit
    return f"{value:,.0f} {name}" if value >= 1000 else f"{value:.4g} {name}"


def percent(share: float, digits: int = 1) -> str:
    """Write a share; a small error of a sum does not give 0 a sign.

    >>> percent(0.1234), percent(-1e-16)
    ('12.3%', '0.0%')
    """
    written = f"{float(share):.{digits}%}"
    return written if float(written[:-1]) else written.lstrip("-")


def clipped(text: str) -> str:
    """Cut a text to a number of lines and columns, and say how many more lines there are."""
    lines = text.splitlines()
    shown = [line if len(line) <= _COLUMNS else line[: _COLUMNS - 2] + " …" for line in lines[:_LINES]]
    return "\n".join(shown if len(lines) <= _LINES else [*shown, f"… {len(lines) - _LINES} more lines"])


def show_table(value: Any, printer: Any, cycle: bool) -> None:
    """Show ``str(value)`` at IPython's top level, ``repr(value)`` inside other values (``_repr_pretty_``)."""
    printer.text(repr(value) if len(printer.stack) > 1 else clipped(str(value)))
