"""Signals that are held back act where they may, and none is lost or taken for an error of a stage."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest
import torch

import ppfunc as pp
from ppfunc.stage.abstract import outline
from ppfunc.stage.interrupts import hold_interrupts, let_interrupts


@pytest.fixture
def sigusr1():
    """Sends this process a signal; its handler notes it, and raises where told to."""
    seen, raises, before = [], [KeyboardInterrupt("struck")], signal.getsignal(signal.SIGUSR1)

    def handler(number, frame):
        seen.append(number)
        raise raises[0]

    signal.signal(signal.SIGUSR1, handler)
    yield lambda: signal.raise_signal(signal.SIGUSR1), seen, raises
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_acts_where_it_is_let_and_at_the_exit(sigusr1):
    strike, seen, _ = sigusr1
    handler = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(KeyboardInterrupt), hold_interrupts():
        strike()
        strike()
        assert seen == []
    assert len(seen) == 1
    assert signal.getsignal(signal.SIGUSR1) is handler
    with hold_interrupts():
        strike()
        with pytest.raises(KeyboardInterrupt), let_interrupts():
            raise AssertionError("it acts before")
        strike()
        assert len(seen) == 2  # held back again
        with pytest.raises(KeyboardInterrupt), let_interrupts():
            pass
        with pytest.raises(KeyboardInterrupt), let_interrupts():
            strike()
        assert len(seen) == 4


def test_after_the_first_exception_the_second_signal_waits(sigusr1):
    strike, seen, _ = sigusr1
    cleaned = []

    def work():
        with hold_interrupts():
            try:
                with let_interrupts():
                    strike()
            except KeyboardInterrupt:
                strike()
                cleaned.append(len(seen))
                raise ValueError("told") from None

    with pytest.raises(KeyboardInterrupt) as raised:
        work()
    assert cleaned == [1] and len(seen) == 2
    assert isinstance(raised.value.__context__, ValueError)


def test_a_result_is_returned_before_a_signal_that_came_late(sigusr1):
    strike, seen, _ = sigusr1

    def work():
        with hold_interrupts(later=True):
            strike()
            return "result"

    got = None
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        got = work()
        time.sleep(5)
    assert got == "result" and len(seen) == 1
    assert time.monotonic() - began < 2.5  # it wakes a thread that sleeps


def test_signals_nest_and_a_handler_that_was_set_meanwhile_stays(sigusr1):
    strike, seen, _ = sigusr1
    with hold_interrupts() as outer:
        outer.keep()
        with let_interrupts(), hold_interrupts():
            strike()
        assert seen == []
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        kept = outer._held.handle
        with pytest.raises(KeyboardInterrupt):
            outer.__exit__(None, None, None)
        outer.__enter__()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    with pytest.raises(KeyboardInterrupt):  # one who has kept our handler to call it later
        kept(signal.SIGUSR1, None)


# -- while a stage is evaluated or traced ------------------------------------------------------


def strike_later(strike, seconds=0.2):
    """Send the signal of this thread after some seconds."""
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    timer.daemon = True
    timer.start()


def squared(y, target):
    return (y - target).square().mean()


def takes_long(call):
    """A stage whose call of this number waits for half a minute before its product: without values first, then traced or tried."""
    calls = [0]

    def stage(w, x):
        calls[0] += 1
        if calls[0] == call:
            time.sleep(30)
        return torch.tanh(x @ w)

    return stage


def on_zeros(w, x):
    """A stage that cannot be evaluated without values, and takes long on zeros."""
    if not x.any():
        time.sleep(30)
    return torch.tanh(x @ w)


def of_many_operators(w, x):
    for _ in range(20_000):
        x = x + w[0]
    return x


def of_a_long_gradient(w, x):
    """One whose forward is done when it is interrupted."""
    for _ in range(1_000):
        x = torch.tanh(x + w)
    return x


CASES = {
    "evaluated": (lambda: takes_long(1), pp.graph),
    "traced": (lambda: takes_long(2), pp.graph),
    "tried without values": (lambda: takes_long(2), pp.functional),
    "tried on zeros": (lambda: on_zeros, pp.functional),
    "between operators": (lambda: of_many_operators, pp.graph),
}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("case", CASES)
def test_an_interrupt_acts_soon_while_a_stage_is_evaluated(sigusr1, case, error):
    """Within a second in the stage's own Python, and from one operator to the next; as what its handler raises, whatever that is."""
    make, engine = CASES[case]
    strike, seen, raises = sigusr1
    raises[0] = error("struck")
    step = pp.value_and_grad([stage := make()], squared, pp.gpipe(1, 2), engine=engine)
    w, x = torch.eye(3), torch.ones(4, 3)
    strike_later(strike)
    began = time.monotonic()
    with pytest.raises(error, match="^struck$"):
        step({0: w}, x, x)
    assert time.monotonic() - began < 1.2 * slowness() and len(seen) == 1
    if stage not in (on_zeros, of_many_operators):
        assert step({0: w}, x, x)[0] > 0


def test_an_interrupt_acts_soon_while_a_gradient_is_traced(sigusr1):
    strike, _, _ = sigusr1
    struck, seconds, plain = [], [], torch.autograd.grad

    def strikes(*args, **kwargs):
        struck.append(time.monotonic())
        strike_later(strike, 0.05)
        return plain(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.autograd, "grad", strikes)
        try:
            pp.graph(of_a_long_gradient, (torch.ones(3), torch.ones(3)))
        finally:
            seconds.append(time.monotonic() - struck[0])
    assert seconds[0] < slowness()


def test_an_interrupt_is_no_error_of_a_stage_that_would_be_tried_on_zeros_after_it(sigusr1):
    """What the handler raises while torch runs is not taken for what the stage raises."""
    strike, seen, raises = sigusr1
    raises[0], calls = RuntimeError("struck"), []

    def stage(w, x):
        calls.append(type(x))
        x = Struck.apply(x, strike)
        return x + w

    with pytest.raises(RuntimeError, match="^struck$"):
        outline(stage, (torch.ones(3), torch.ones(3)))
    assert len(calls) == len(seen) == 1


class Struck(torch.overrides.TorchFunctionMode):
    """A signal that comes while torch dispatches."""

    @staticmethod
    def apply(x, strike):
        with Struck() as mode:
            mode.strike = strike
            return x * 2

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.strike()
        return func(*args, **(kwargs or {}))


def slowness():
    """How much longer than on an idle machine something may take."""
    return min(10.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


# -- wherever torch is -------------------------------------------------------------------------


def struck_everywhere(rank, size, tries, within=""):
    """A signal comes at the n-th function, of those in such files, that is called while a stage is evaluated, traced and tried.
    What each has raised."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    def stage(w, x):
        x = torch.nn.functional.layer_norm(x, (4,))
        return torch.nn.functional.dropout(torch.nn.functional.gelu(x @ w), 0.1) @ w

    def run(engine, at=None):
        calls = [0]

        def count(frame, event, argument):
            called = event == "call" and frame.f_code.co_filename.endswith(within)
            calls[0] += called
            if called and calls[0] == at:
                signal.raise_signal(signal.SIGUSR1)

        sys.setprofile(count)
        try:
            engine(stage, (torch.ones(4, 4), torch.ones(2, 4)))
        finally:
            sys.setprofile(None)
        return calls[0]

    signal.signal(signal.SIGUSR1, interrupt)
    told = []
    for engine in (pp.graph, pp.functional):
        run(engine)
        total = run(engine)
        for n in range(tries):
            try:
                run(engine, 1 + n * total // tries)
                told.append("nothing")
            except BaseException as error:
                told.append(type(error).__name__)
        assert abs(run(engine) - total) < total / 10
    return told


def test_an_interrupt_anywhere_in_torch_aborts_no_process(fresh, request):
    tries = 1000 if request.config.getoption("--large") else 60
    (told,) = fresh(1)(struck_everywhere, tries, timeout=550)
    assert set(told) == {"KeyboardInterrupt"}


def test_an_interrupt_of_a_profiler_aborts_no_process(fresh):
    """Python that torch calls on the way to ``__torch_dispatch__``, such as a profiler's, was taken for the stage's own."""
    (told,) = fresh(1)(struck_everywhere, 40, "torch/_compile.py", timeout=300)
    assert set(told) == {"KeyboardInterrupt"}
