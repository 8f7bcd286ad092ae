"""Programs in C++: the bits of Python's, its memory, its errors; and when Python runs instead."""

from __future__ import annotations

import fcntl
import gc
import hashlib
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ppfunc as pp
from ppfunc.stage import graph
from ppfunc.stage.engines.tracing import cut, native
from tests.stage.test_accumulate import Given, chain, chained

pytestmark = [pytest.mark.compiler, pytest.mark.filterwarnings("ignore:.*nothing depends on")]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The library, built once for all versions of a machine, in the folder of torch's extensions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PPFUNC_NATIVE", "always")
        made = native._Library()
        made.begin()
    return made


@pytest.fixture
def in_cpp(library, monkeypatch):
    """Let programs run in C++, and count those that do."""
    made = []
    monkeypatch.setattr(native, "library", library)
    make = library.make
    monkeypatch.setattr(library, "make", lambda *rows: made.append(rows) or make(*rows))
    return made


def test_every_kind_of_stage_gives_the_same_bits(case, run, in_cpp):
    plain = run(graph(case.fn, case.args, has_aux=case.has_aux), case)
    assert in_cpp
    native.library, library = native._Library(), native.library
    native.library.failure = "off"
    try:
        program = graph(case.fn, case.args, has_aux=case.has_aux)
        assert run(program, case) == plain
        want = run(program, case, apart=True)
    finally:
        native.library = library
    program = graph(case.fn, case.args, has_aux=case.has_aux)
    assert run(program, case, apart=True) == want == plain


def test_most_programs_run_in_cpp(case, run, in_cpp):
    program = graph(case.fn, case.args, has_aux=case.has_aux)
    run(program, case)
    for function in program.flat[:2]:
        fastest = function.fastest()
        assert fastest is not function.function or any(
            n.target in native_free(n) for n in function.recipe.block.body
        )


def native_free(node):
    from ppfunc.stage.engines.tracing.graph import is_mutable
    from ppfunc.stage.engines.tracing.native import RECORDING

    return {RECORDING} | ({node.target} if is_mutable(node) else set())


@torch.no_grad()
def test_residuals_are_freed_after_their_last_use(in_cpp):
    seen = []

    class Watching:
        def add(self, gradients, numbers, microbatch, fresh):
            gc.collect()
            seen.append([alive() is not None for alive in refs])

    params, x = chained()
    program = graph(chain, (params, x))
    flat = program.flat
    leaves = tuple(t for pair in params for t in pair)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut, "_TOGETHER", 1)
        (y,), residuals = flat.forward.fastest()(leaves, (x,), ())
        made = [t for t in residuals if not any(t is p for p in (*leaves, x))]
        refs = [weakref.ref(t) for t in made]
        del made, y
        add = flat.backward.accumulating.fastest()
        assert type(add).__name__ == "builtin_function_or_method"
        waiting = {0: residuals}
        del residuals
        add(waiting.pop(0), (torch.ones(2, 64),), (Watching(), 0, None))
    assert seen[0].count(True) < len(refs) or len(refs) == 0
    assert not any(alive() for alive in refs)


@torch.no_grad()
def test_arguments_that_others_refer_to_stay(in_cpp):
    program = graph(lambda w, x: (x @ w).sin(), (torch.ones(2, 2), torch.ones(1, 2)))
    (y,), residuals = program.flat.forward.fastest()((torch.ones(2, 2),), (torch.ones(1, 2),), ())
    first = program.flat.backward.fastest()(residuals, (y,))
    second = program.flat.backward.fastest()(residuals, (y,))
    assert all(isinstance(t, torch.Tensor) for t in residuals)
    assert all(
        torch.equal(a, b) for p, q in zip(first, second, strict=True) for a, b in zip(p, q, strict=True)
    )


@torch.no_grad()
def test_views_are_made_again_without_their_operators(in_cpp):
    """Of a tensor that lies as that of the first call did, with its memory; of another by the operator."""

    def stage(p, x):
        q, k = F.linear(x, p["w"], p["b"]).view(4, 2, 3).permute(2, 0, 1)[:2].unbind()
        y = F.linear((q + k).reshape(2, 4), p["w"].reshape(8, 3).flatten()[3:19].view(4, 4))
        return y.t().chunk(2), p["w"].t()[1:].unsqueeze(0), x.detach()[1:].unsqueeze(0).expand(2, 3, 4)

    def call(*values):
        (w, b), x = values[:2], values[2]
        return program.fastest()((w, b), (x,), ()), program.function((w, b), (x,), ())

    def tensors(**lies):
        w = torch.randn(4, 6).t() if "turned" in lies else torch.randn(6, 4)
        return w, torch.randn(6), torch.randn(5, 4)[1:] if "late" in lies else torch.randn(4, 4)

    program = graph(stage, ({"w": torch.ones(6, 4), "b": torch.ones(6)}, torch.ones(4, 4))).flat.forward
    for lies in ({}, {}, {"turned": True}, {"late": True}, {}):
        values = tensors(**lies)
        (got, saved), (want, others) = call(*values)
        for a, b in zip((*got, *saved), (*want, *others), strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride()
            assert (a.untyped_storage().data_ptr() in {v.untyped_storage().data_ptr() for v in values}) == (
                b.untyped_storage().data_ptr() in {v.untyped_storage().data_ptr() for v in values}
            )
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        program.fastest()(values[:2], values[2:], ())
    names = {event.name for event in profile.events()}
    assert "aten::mm" in names and "aten::addmm" in names
    assert names.isdisjoint({"aten::linear", "aten::t", "aten::view", "aten::permute", "aten::unbind"})


@torch.no_grad()
def test_gradients_are_added_up_while_a_program_runs(in_cpp, monkeypatch):
    monkeypatch.setattr(cut, "_TOGETHER", 1)
    params, x = chained()
    program = graph(chain, (params, x)).flat
    leaves = tuple(t for pair in params for t in pair)
    _, residuals = program.forward(leaves, (x,), ())
    given, gy = Given(), (torch.ones(2, 64),)
    gx = program.backward.accumulating(residuals, gy, (given, 3, None))
    gparams, want = program.backward.function(residuals, gy)
    assert torch.equal(gx[0], want[0]) and len(given.parts) > 2
    assert sorted(given.gradients) == list(range(len(gparams)))
    assert all(torch.equal(g, gparams[n]) and m == 3 for n, (g, m) in given.gradients.items())


@torch.no_grad()
def test_gradients_are_added_in_place_without_python(in_cpp, monkeypatch):
    """To the sums that are given; those of a part with a leaf that has none go by `add`."""
    monkeypatch.setattr(cut, "_TOGETHER", 1)
    params, x = chained()
    program = graph(chain, (params, x)).flat
    leaves, gy = tuple(t for pair in params for t in pair), (torch.ones(2, 64),)
    _, residuals = program.forward(leaves, (x,), ())
    gparams, _ = program.backward.function(residuals, gy)
    for missing in ((), (1,), range(len(gparams))):
        given = Given()
        totals = [None if n in missing else torch.full_like(g, 0.5) for n, g in enumerate(gparams)]
        program.backward.accumulating.fastest()(residuals, gy, (given, 3, tuple(totals)))
        by_add = {n for part in given.parts for n in part}
        assert {*missing} <= by_add and (missing or not by_add)
        for n, g in enumerate(gparams):
            got = given.gradients[n][0] if n in by_add else totals[n]
            assert torch.equal(got, g if n in by_add else g + 0.5)


@torch.no_grad()
def test_a_custom_operator_may_differentiate_in_its_kernel(in_cpp):
    """Programs run below autograd, whose keys `enable_grad` does not bring back."""
    definition = torch.library.Library("ppfunc_test_native", "DEF")
    definition.define("slope(Tensor x) -> Tensor")

    def slope(x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad((x**3).sum(), x)[0]

    definition.impl("slope", slope, "CPU")
    definition.impl("slope", torch.empty_like, "Meta")
    w, x = torch.randn(3), torch.randn(3)
    program = graph(lambda w, x: torch.ops.ppfunc_test_native.slope(x.detach()) * w, (w, x)).flat
    run = program.forward.fastest()
    assert run is not program.forward.function
    (y,), _ = run((w,), (x,), ())
    assert torch.equal(y, program.forward.function((w,), (x,), ())[0][0])
    assert torch.allclose(y, 3 * x**2 * w)


@torch.no_grad()
def test_an_error_has_its_class_and_the_users_line(in_cpp):
    def stage(w, x):
        return w[x].sin()  # fails here

    w = torch.randn(5, 3)
    program = graph(stage, (w, torch.tensor([1]))).flat
    run = program.forward.fastest()
    assert run is not program.forward.function
    with pytest.raises(IndexError, match="index 7 is out of bounds") as caught:
        run((w,), (torch.tensor([7]),), ())
    from ppfunc.stage.errors import line_of

    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "# fails here" in text)
    assert line_of(caught.value) == f" at {__file__}:{line}"
    assert "forward" in "".join(traceback.format_tb(caught.value.__traceback__))
    (y,), _ = run((w,), (torch.tensor([4]),), ())  # and it goes on
    assert torch.equal(y, w[4:].sin())


@torch.no_grad()
@pytest.mark.parametrize("arguments", [((),), ((), (), ()), (((),), ((torch.ones(2),),), ((),)), (1, 2, 3)])
def test_wrong_arguments_raise(in_cpp, arguments):
    program = graph(lambda w, x: w * x, (torch.ones(2), torch.ones(2))).flat
    with pytest.raises(TypeError):
        program.forward.fastest()(*arguments)


@torch.no_grad()
def test_python_runs_where_somebody_looks_at_operators(in_cpp):
    class Seeing(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    forward = graph(lambda w, x: (w * x).sin(), (torch.ones(2), torch.ones(2))).flat.forward
    assert forward.fastest() is not forward.function
    with Seeing() as mode:
        assert forward.fastest() is forward.function
        forward((torch.ones(2),), (torch.ones(2),), ())
    assert torch.ops.aten.sin.default in mode.seen
    torch.func.vmap(lambda w: forward((w,), (torch.ones(2),), ())[0][0])(torch.ones(3, 2))


@torch.no_grad()
@pytest.mark.parametrize("traced", [False, True])
def test_autocast_casts_as_in_python(in_cpp, traced):
    """Bits changed with the library: a program that was traced without autocast, and called within it."""
    w, x = torch.randn(4, 4), torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=traced):
        forward = graph(lambda w, x: x @ w, (w, x)).flat.forward
    for on in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            (y,), _ = forward((w,), (x,), ())
            (want,), _ = forward.function((w,), (x,), ())
            assert y.dtype == want.dtype and torch.equal(y, want)
            assert (forward.fastest() is forward.function) == (on and not traced)


@pytest.fixture
def interrupts():
    """Where the tests are a shell's job in the background, SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@torch.no_grad()
def test_an_interrupt_cuts_a_long_program(in_cpp, interrupts):
    def stage(w, x):
        for _ in range(400):
            x = x @ w
        return x

    n = 500
    program = graph(stage, (torch.eye(n), torch.eye(n))).flat
    run = program.forward.fastest()
    assert run is not program.forward.function
    begun = time.monotonic()
    run((torch.eye(n),), (torch.eye(n),), ())
    whole = time.monotonic() - begun
    for _ in range(20):  # a thread may be late
        timer = threading.Timer(
            whole / 4, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
        )
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            run((torch.eye(n),), (torch.eye(n),), ())
            timer.join()
        if time.monotonic() - begun < 0.75 * whole:
            return
    pytest.fail("no program was cut")


@torch.no_grad()
def test_the_interpreter_is_free_while_a_program_runs(in_cpp):
    """Two threads run the same program at the same time, each in memory of its own."""
    w, x = torch.randn(64, 64), torch.randn(8, 64)
    program = graph(lambda w, x: (x @ w).tanh() @ w, (w, x)).flat
    run, want, wrong = program.forward.fastest(), program.forward.function((w,), (x,), ())[0][0], []

    def often():
        for _ in range(200):
            if not torch.equal(run((w,), (x,), ())[0][0], want):
                wrong.append(1)

    threads = [threading.Thread(target=often) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


@torch.no_grad()
def test_a_step_gives_the_same_bits(in_cpp):
    def stage(p, x):
        return torch.nn.functional.dropout(torch.tanh(x @ p["w"] + p["b"]), 0.5)

    def loss_fn(y, t):
        return (y - t).square().mean()

    params = {s: {"w": torch.randn(8, 8), "b": torch.randn(8)} for s in range(4)}
    x, t = torch.randn(32, 8), torch.randn(32, 8)
    results = []
    for off in (False, True):
        if off:
            native.library = native._Library()
            native.library.failure = "off"
        step = pp.value_and_grad([stage] * 4, loss_fn, pp.zb_h1(ranks=4, microbatches=8))
        results.append([step(params, x, t, seed=(0, n)) for n in range(2)])
    assert in_cpp
    for (a, g), (b, h) in zip(*results, strict=True):
        assert torch.equal(a, b)
        assert all(torch.equal(g[s][k], h[s][k]) for s in g for k in g[s])


def first_call(rank, size, environment):
    """Call a program with a library of its own; returns the sum of its result, and why there is none."""
    ones = torch.ones(2)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(native, "library", native._Library())
        forward = graph(lambda w, x: w * x, (ones, ones)).flat.forward
        return f"{forward((ones,), (ones,), ())[0][0].sum().item()} {native.library.failure}"


@pytest.mark.parametrize(
    "environment, text",
    [
        ({"PPFUNC_NATIVE": "never"}, "2.0 PPFUNC_NATIVE is 'never'"),
        ({"PPFUNC_NATIVE": "auto", "CXX": "no-such-compiler"}, "2.0 it is built on Linux, by g++"),
        ({"PPFUNC_NATIVE": "always", "CXX": "no-such-compiler"}, "PPFUNC_NATIVE is 'always', but"),
        ({"PPFUNC_NATIVE": "auto", "PPFUNC_CACHE": "x" * 5000}, "2.0"),
        ({"PPFUNC_NATIVE": "always", "PPFUNC_CACHE": "x" * 5000}, "there is no native program: OSError"),
        (
            {"PPFUNC_NATIVE": "auto", "PPFUNC_CACHE": "~nobody-of-this-name/x"},
            "2.0 this user has no home folder",
        ),
        ({"PPFUNC_NATIVE": "sometimes"}, "got 'sometimes', expected 'auto', 'always' or 'never'"),
        ({"PPFUNC_NATIVE": "always", "CXX": "false", "PPFUNC_CACHE": "{tmp}"}, "false failed"),
    ],
)
def test_when_there_is_none_is_told(tmp_path, environment, text):
    try:
        told = first_call(0, 1, {k: v.format(tmp=tmp_path) for k, v in environment.items()})
    except (RuntimeError, ValueError) as error:
        told = str(error)
    assert text in told


def test_a_library_that_others_can_write_is_not_loaded(library, tmp_path, monkeypatch):
    monkeypatch.setenv("PPFUNC_CACHE", str(tmp_path))
    monkeypatch.setenv("PPFUNC_NATIVE", "auto")
    file = tmp_path / f"ppfunc-{native._key()}.so"
    file.write_bytes(native._ENDING.format(hashlib.sha256().hexdigest()).encode())
    file.chmod(0o666)
    other = native._Library()
    other.begin()
    assert other.make is None and "is not of this user alone" in other.failure


@pytest.mark.parametrize("size", [0, 100, 4096, 200_000, -1])
def test_a_library_that_was_cut_short_is_built_again(library, tmp_path, fresh, size):
    """Loading it ended the process by SIGBUS."""
    (built,) = native._folder().glob(f"ppfunc-{native._key()}.so")
    file = tmp_path / built.name
    file.write_bytes(built.read_bytes()[:size])
    file.chmod(0o700)
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nhead -c -{SEAL} {built} > "{file}.part"\n')
    compiler.chmod(0o700)
    environment = {"PPFUNC_NATIVE": "always", "PPFUNC_CACHE": str(tmp_path), "CXX": str(compiler)}
    assert fresh(1)(first_call, environment) == ["2.0 "]
    assert file.read_bytes() == built.read_bytes()


SEAL = len(native._ENDING.format(hashlib.sha256().hexdigest()))


def test_a_wrong_choice_is_told_at_every_step(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    library = native._Library()
    for choice, error, words in (
        *[("sometimes", ValueError, "got 'sometimes', expected 'auto', 'always' or 'never'")] * 2,
        *[("always", RuntimeError, "there is no native program: it is built on Linux")] * 2,
    ):
        monkeypatch.setenv("PPFUNC_NATIVE", choice)
        with pytest.raises(error, match=words):
            library.begin()


# -- whatever goes wrong, steps go on without it ------------------------------------------------


def compiler_of(folder, script):
    """A compiler that runs this script, in whose second word the library is to be."""
    compiler = folder / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o700)
    return str(compiler)


def ended(library):
    """The library, once it is there or will not be."""
    library.begin()
    for thread in [t for t in threading.enumerate() if t.name == "ppfunc build"]:
        thread.join(60)
    return library.make, library.failure


class NoThread(threading.Thread):
    def start(self):
        raise RuntimeError("can't start new thread")


WRONG = {
    "its messages are no text": ("printf 'caf\\351' >&2; exit 1", "{}", "failed: caf\ufffd"),
    "no such words": ("", "{} '", "ValueError: No closing quotation"),
    "no thread": ("", "{}", "RuntimeError: can't start new thread"),
    "several words": ("echo words >&2; exit 1", "env {} word", "word failed: words"),
    "no words": ("", " ", "it is built on Linux"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_goes_wrong_in_a_build_is_noted(case, tmp_path, monkeypatch):
    script, words, failure = WRONG[case]
    monkeypatch.setenv("CXX", words.format(compiler_of(tmp_path, script)))
    monkeypatch.setenv("PPFUNC_CACHE", str(tmp_path))
    monkeypatch.setenv("PPFUNC_NATIVE", "auto")
    if case == "no thread":
        monkeypatch.setattr(native.threading, "Thread", NoThread)
    make, told = ended(native._Library())
    assert make is None and failure in told


def test_an_interrupted_build_begins_again(tmp_path, monkeypatch):
    """It was kept as a failure without a reason."""
    monkeypatch.setenv("PPFUNC_CACHE", str(tmp_path))
    monkeypatch.setenv("PPFUNC_NATIVE", "always")
    raised = [KeyboardInterrupt(), OSError("full")]

    def build(*args):
        raise raised.pop(0)

    monkeypatch.setattr(native, "_build", build)
    library = native._Library()
    with pytest.raises(KeyboardInterrupt):
        library.begin()
    with pytest.raises(RuntimeError, match="OSError: full"):
        library.begin()


def forks_while_it_compiles(rank, size, folder):
    """A child that lives on is forked while the library is compiled. Whether the lock is to be had then."""
    began = Path(folder) / "began"
    compiler = compiler_of(Path(folder), f"touch {began}; sleep 0.3; exit 1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", compiler)
        patch.setenv("PPFUNC_CACHE", folder)
        patch.setenv("PPFUNC_NATIVE", "auto")
        library = native._Library()
        library.begin()
        while not began.exists():
            time.sleep(0.01)
        if not (child := os.fork()):
            time.sleep(60)
            os._exit(0)
        try:
            ended(library)
            with open(next(Path(folder).glob("*.lock")), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return library.failure


@pytest.mark.skipif(sys.platform != "linux", reason="it is built on Linux")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_child_keeps_no_lock(tmp_path, fresh):
    """Other processes waited for it as long as the child lived."""
    (failure,) = fresh(1)(forks_while_it_compiles, str(tmp_path))
    assert "failed" in failure


def forks_while_another_begins(rank, size):
    """A child is forked while a thread holds what begins; how it ends when it begins, too."""
    with native.library._beginning:
        if not (child := os.fork()):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("PPFUNC_NATIVE", "never")
                native.library.begin()
            os._exit(7)
    for _ in range(1000):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return "hangs"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_child_that_is_forked_while_a_thread_begins_goes_on(fresh):
    assert fresh(1)(forks_while_another_begins) == [7]
