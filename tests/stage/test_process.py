"""Signals are delayed where what handlers raise would do harm; none is lost, or taken for an error of a
stage.
"""

from __future__ import annotations

import signal
import sys
import time

import pytest
import torch

import ppfunc as pp
from ppfunc.stage.abstract.outline import outline
from ppfunc.stage.process import act_on_interrupts, hold_interrupts, keep_holding
from tests.models import squared


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


def test_a_signal_acts_at_the_exit_once(sigusr1):
    strike, seen, _ = sigusr1
    handler = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(KeyboardInterrupt), hold_interrupts():
        strike()
        strike()
        assert seen == []
    assert len(seen) == 1
    assert signal.getsignal(signal.SIGUSR1) is handler


def test_after_the_first_exception_the_second_signal_waits(sigusr1):
    strike, seen, _ = sigusr1
    cleaned = []

    def work():
        with hold_interrupts():
            try:
                strike()
                act_on_interrupts()
            except KeyboardInterrupt:
                strike()
                act_on_interrupts()
                cleaned.append(len(seen))
                raise ValueError("told") from None

    with pytest.raises(KeyboardInterrupt) as raised:
        work()
    assert cleaned == [1] and len(seen) == 2
    assert isinstance(raised.value.__context__, ValueError)


def test_both_of_two_signals_act_where_the_first_raises(sigusr1):
    strike, seen, _ = sigusr1
    before = signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    try:
        with pytest.raises(KeyboardInterrupt), hold_interrupts():
            signal.raise_signal(signal.SIGUSR2)
            strike()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert sorted(seen) == sorted([signal.SIGUSR1, signal.SIGUSR2])


def test_the_handler_that_was_there_acts_at_the_exit_and_nothing_afterwards(sigusr1):
    strike, _, _ = sigusr1
    seen, before = [], signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(len(seen)))

    def work():
        with hold_interrupts():
            strike()
            return "result", list(seen)

    assert work() == ("result", []) and seen == [0]
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # by which a signal that came now would end the process
    time.sleep(0.2)
    signal.signal(signal.SIGUSR1, before)
    assert seen == [0]


def test_the_outermost_holds_and_a_handler_that_was_set_meanwhile_stays(sigusr1):
    strike, seen, _ = sigusr1
    with pytest.raises(KeyboardInterrupt), hold_interrupts():
        keep_holding()
        with hold_interrupts():
            strike()
        act_on_interrupts()
        assert seen == []
        in_place = signal.getsignal(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    with pytest.raises(KeyboardInterrupt):  # of one who has kept it to call it later
        in_place(signal.SIGUSR1, None)


# -- while a stage is evaluated or traced ------------------------------------------------------


CASES = {  # the call of the stage in which a signal comes: without values first, then traced or tried
    "evaluated": (1, pp.engines.graph),
    "traced": (2, pp.engines.graph),
    "tried without values": (2, pp.engines.functional),
}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("case", CASES)
def test_a_signal_acts_once_a_stage_is_evaluated(sigusr1, case, error):
    """What its handler raises is no error of the stage, and the step can be tried again."""
    at, engine = CASES[case]
    strike, seen, raises = sigusr1
    raises[0], ended = error("struck"), []

    def stage(w, x):
        if len(ended) == at - 1:
            strike()
        ended.append(True)
        return torch.tanh(x @ w)

    step = pp.value_and_grad([stage], squared, pp.gpipe(1, 2), engine=engine)
    w, x = torch.eye(3), torch.ones(4, 3)
    with pytest.raises(error, match="^struck$"):
        step({0: w}, x, x)
    assert len(seen) == 1 and len(ended) == at
    assert step({0: w}, x, x)[0] > 0


def test_a_signal_acts_once_a_stage_that_needs_values_has_run_on_zeros(sigusr1):
    strike, seen, _ = sigusr1

    def stage(w, x):
        if not x.any():
            strike()
        return torch.tanh(x @ w)

    with pytest.raises(KeyboardInterrupt, match="^struck$"):
        outline(stage, (torch.eye(3), torch.ones(4, 3)))
    assert len(seen) == 1


@pytest.mark.parametrize("engine", [pp.engines.graph, pp.engines.functional, pp.engines.eager])
def test_a_handler_that_computes_gets_values_while_a_stage_is_traced(engine):
    """It was traced with the stage: it got a tensor without values, which it raised for in the step."""
    numbers, calls = [], []

    def handler(number, frame):
        numbers.append((torch.ones(3) + torch.arange(3)).sum().item())

    def stage(w, x):
        signal.raise_signal(signal.SIGUSR1)
        calls.append(True)
        return torch.tanh(x @ w)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        w, x = torch.eye(3), torch.ones(4, 3)
        loss, grads = pp.value_and_grad([stage], squared, pp.gpipe(1, 2), engine=engine)({0: w}, x, x)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert numbers == [6.0] * len(numbers) and 0 < len(numbers) <= len(calls)
    w.requires_grad_()
    expected = squared(torch.tanh(x @ w), x)
    expected.backward()
    torch.testing.assert_close((loss, grads[0]), (expected.detach(), w.grad))


# -- wherever torch is -------------------------------------------------------------------------


def struck_everywhere(rank, size, tries, within=""):
    """A signal comes at the n-th function, of those in such files, that is called while a stage is traced or
    tried.
    What each call has raised.
    """

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
    outcomes = []
    for engine in (pp.engines.graph, pp.engines.functional):
        run(engine)
        total = run(engine)
        for n in range(tries):
            try:
                run(engine, 1 + n * total // tries)
                outcomes.append("nothing")
            except BaseException as error:
                outcomes.append(type(error).__name__)
        run(engine)
    return outcomes


@pytest.mark.parametrize("within", ["", "torch/_compile.py"], ids=["anywhere", "of a profiler"])
def test_a_signal_while_a_stage_is_traced_aborts_no_process(fresh, request, within):
    """An exception in Python that torch calls from C++, as that of a profiler, would abort it."""
    tries = 1000 if request.config.getoption("--large") else 20
    (outcomes,) = fresh(1)(struck_everywhere, tries, within, timeout=550)
    assert set(outcomes) <= {"KeyboardInterrupt", "nothing"}  # caches fill: some runs call fewer functions
    assert outcomes.count("KeyboardInterrupt") > len(outcomes) // 2
