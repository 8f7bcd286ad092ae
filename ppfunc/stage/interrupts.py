"""Hold back signals where an exception would tear a step apart, or abort the process."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import FunctionType
from typing import Any, ParamSpec, Protocol, Self, TypeVar

from .errors import is_of_a_library

P = ParamSpec("P")
R = TypeVar("R")
Handler = Callable[[int, Any], Any]
Where = Callable[[Any], bool]  # of the frame in which a signal has come: whether it acts there

# The functions behind those of the module, whose enums take 10 us of every step.
_set, _get = (getattr(sys.modules["_signal"], name) for name in ("signal", "getsignal"))
_SIGNALS = sorted(set(map(int, signal.valid_signals())) & set(range(32)))
_LATER = 0.05  # seconds for a result to reach the caller
_PYTHON = Path(threading.__file__).parent
_DISPATCHES = {"__torch_dispatch__", "__torch_function__"}


def _never(frame: Any) -> bool:
    return False


def _always(frame: Any) -> bool:
    return True


def _in_own_python(frame: Any) -> bool:
    """Whether the user's Python runs, or what it calls of Python's library, and no operator of torch has called it."""
    while frame is not None and _is_of_python(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or is_of_a_library(frame.f_code.co_filename):
        return False
    while frame is not None and not _dispatches(frame):
        frame = frame.f_back
    return frame is None


def _dispatches(frame: Any) -> bool:
    """Whether the frame is that of a function that operators call, or of a wrapper of torch around one, which has it as ``fn``."""
    if frame.f_code.co_name in _DISPATCHES:
        return True
    wrapped = frame.f_locals.get("fn") if is_of_a_library(frame.f_code.co_filename) else None
    return isinstance(wrapped, FunctionType) and wrapped.__name__ in _DISPATCHES


def _is_of_python(path: str) -> bool:
    return path.startswith("<") or (_PYTHON in Path(path).parents and "site-packages" not in path and "dist-packages" not in path)


class Signals(Protocol):
    """The signals of one thread whose handlers are Python functions, which may raise."""

    def handlers(self) -> dict[int, Handler]: ...

    def get(self, number: int) -> Any: ...

    def set(self, number: int, handler: Handler) -> None: ...

    def send_later(self, number: int) -> None:
        """Send this thread a signal, once its functions have returned what they are about to return."""
        ...


class ProcessSignals:
    """Signals of this process. Only the main thread runs handlers; in other threads nothing is held."""

    def handlers(self) -> dict[int, Handler]:
        if threading.get_ident() != threading.main_thread().ident:
            return {}
        return {number: handler for number in _SIGNALS if callable(handler := _get(number))}

    def get(self, number: int) -> Any:
        return _get(number)

    def set(self, number: int, handler: Handler) -> None:
        _set(number, handler)

    def send_later(self, number: int) -> None:
        # To the main thread itself, which a signal that the timer's thread receives would not wake from its sleep.
        timer = threading.Timer(_LATER, signal.pthread_kill, (threading.main_thread().ident, number))
        timer.daemon = True
        timer.start()


PROCESS = ProcessSignals()


class _Carried(BaseException):
    """Carries what a handler raises while a stage is evaluated past all who would take it for an error of the stage."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Held:
    """The handlers of a thread while signals are held back.

    Args:
        signals: of this thread.

    Attributes:
        acts: where signals act at once.
        kept: whether they are held until the exit, whatever lies between.
        handlers: those that were set before, by number.
        pending: numbers of the signals that came meanwhile, each once; the last acts first.
    """

    __slots__ = ("acts", "handlers", "kept", "pending", "signals")

    def __init__(self, signals: Signals) -> None:
        self.signals, self.kept = signals, False
        self.acts: Where = _never
        self.handlers: dict[int, Handler] = {}
        self.pending: dict[int, None] = {}

    def handle(self, number: int, frame: Any) -> None:
        if self.acts(frame):
            self._act(number, frame)
        else:
            self.pending[number] = None

    def _act(self, number: int, frame: Any) -> None:
        evaluating = self.acts is _in_own_python
        try:
            self.handlers[number](number, frame)
        except BaseException as error:
            self.acts = _never  # what is raised is handled in peace
            if evaluating and isinstance(error, Exception):
                raise _Carried(error) from error
            raise

    def let(self, acts: Where) -> None:
        """Let signals act from here on, those first that have come before; not where they are kept."""
        if not self.kept:
            self.acts = acts
            while self.pending and self.acts is acts is not _never:
                self._act(self.pending.popitem()[0], sys._getframe())

    def end(self) -> None:
        """Put all handlers back but those that were changed meanwhile, then let all act that were held, also where one raises."""
        try:
            for number, handler in self.handlers.items():
                if self.signals.get(number) == self.handle:
                    self.signals.set(number, handler)
            self.kept = False
            self.let(_always)  # for those, too, who have kept a handler to call it
        except BaseException:
            self.end()
            raise


class _Thread(threading.local):
    held: _Held | None = None


_thread = _Thread()


class hold_interrupts:
    """Delay signals until exit, except inside :class:`let_interrupts`. Only signals with Python handlers are delayed.

    The first that raises an exception holds back those that follow.

    Args:
        later: where the body has not raised, they act a moment after the exit instead, when its result has reached the caller.
        signals: of this thread.
        acts: where they act nevertheless.
    """

    __slots__ = ("_acts", "_before", "_held", "_later", "_signals")

    def __init__(self, later: bool = False, signals: Signals = PROCESS, acts: Where = _never) -> None:
        self._later, self._signals, self._acts = later, signals, acts
        self._before: tuple[Where, bool] | None = None  # of the one around this

    def __enter__(self) -> Self:
        held = _thread.held
        if held is None:
            held = _Held(self._signals)
            try:
                for number, handler in self._signals.handlers().items():
                    held.handlers[number] = handler
                    self._signals.set(number, held.handle)
            except BaseException:
                held.end()
                raise
            _thread.held = held
        else:
            self._before = held.acts, held.kept
            if held.acts is _never:
                self._acts = _never
        held.acts, self._held = self._acts, held
        return self

    def keep(self) -> None:
        """Let none act before the exit."""
        self._held.kept = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        held = self._held
        acts: Where = _always
        if self._before is not None:
            acts, held.kept = self._before
            if held.acts is self._acts:
                held.let(acts)
        else:
            _thread.held = None
            while kind is None and self._later and held.pending:
                held.signals.send_later(held.pending.popitem()[0])
            held.end()
        if isinstance(error, _Carried) and acts is not _in_own_python:
            raise error.error from error.error.__cause__


class let_interrupts:
    """Let signals act that are held back in this thread, those too that have come before."""

    __slots__ = ("_acts", "_held")

    def __enter__(self) -> None:
        self._held = held = _thread.held
        if held is not None:
            self._acts = held.acts
            held.let(_always)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._held is not None:
            self._held.acts = self._acts if kind is None else _never


def keep_holding() -> None:
    """Let none act before the outermost :class:`hold_interrupts`, or the step that runs, has ended."""
    if _thread.held is not None:
        _thread.held.kept = True


def between_operators(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates what evaluates or traces a stage: interrupts act in the stage's own Python, and before its next operator.

    Torch evaluates without values by Python that it calls from functions of C++ that must not raise: an exception there aborts the
    process. What a handler raises is no error of the stage: it comes out of this function as it is.
    """

    @wraps(function)
    def spared(*args: P.args, **kwargs: P.kwargs) -> R:
        with hold_interrupts(acts=_in_own_python):
            return function(*args, **kwargs)

    return spared


def interrupt_here() -> None:
    """Let interrupts act that have come within :func:`between_operators`; called where an exception is safe."""
    held = _thread.held
    if held is not None and held.pending and held.acts is _in_own_python:
        held.let(_in_own_python)
