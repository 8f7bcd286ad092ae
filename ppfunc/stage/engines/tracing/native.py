"""Run programs in C++, by ``native.cpp``: it is given tables, and has no Python between operators.

The library is compiled once per torch, in the background, and kept in a folder. Until it is there, programs
run as Python functions, with the same bits. ``PPFUNC_NATIVE`` says when it serves:

* ``auto``, the default: from the moment it is there, on Linux, if a compiler is;
* ``always``: before the first program runs, or RuntimeError;
* ``never``.

``PPFUNC_CACHE`` names the folder, by default that of torch's own extensions.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any, Literal

import torch
from torch.fx import Node

from ppfunc import _logs

from ..._torch import OpOverload, schema
from ...errors import TRACED_LINES
from .cut import Block
from .graph import arguments, is_element, is_mutable

_tracing = _logs.room("tracing")
aten = torch.ops.aten
# It returns what its backward needs only in grad mode, outside of which programs run.
RECORDING = torch.ops.aten.mkldnn_rnn_layer.default
Program = Callable[..., Any]

_SOURCE = Path(__file__).with_name("native.cpp")
_FLAGS = ("-O1", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-DTORCH_EXTENSION_NAME=native")
_SCRIPT = 'umask 077 && "$@" && sha256sum < "$0.part" >> "$0.part" && mv "$0.part" "$0"'
_ENDING = "{}  -\n"  # of a library, as sha256sum writes it
_LIBRARIES = ("-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10")


class _Library:
    """The library of this process.

    Attributes:
        make: makes a program of a table; None until the library is there.
        failure: why it will not be there.
    """

    def __init__(self) -> None:
        self.make: Callable[..., Program] | None = None
        self.failure = ""
        self._begun, self._beginning = False, threading.Lock()

    def begin(self) -> None:
        """Load the library, or let a thread have it built, at the first call.

        Raises:
            ValueError: ``PPFUNC_NATIVE`` has another value.
            RuntimeError: it is ``always``, and there is no library.
        """
        choice = os.environ.get("PPFUNC_NATIVE", "auto")
        if choice not in ("auto", "always", "never"):
            raise ValueError(f"PPFUNC_NATIVE: got {choice!r}, expected 'auto', 'always' or 'never'")
        with self._beginning:
            if not self._begun:
                self._attempt(self._begin, choice)
                self._begun = True  # not where an interrupt has ended it
        if choice == "always" and self.make is None:
            raise RuntimeError(
                f"PPFUNC_NATIVE is 'always', but there is no native program: {self.failure}"
                "; mend that, or set it to 'auto'"
            )

    def _attempt(self, call: Callable[..., None], *args: Any) -> None:
        """Note why the library will not be there, for any error of ``call``; Python do without."""
        try:
            call(*args)
        except subprocess.CalledProcessError as error:
            self.failure = f"{os.environ.get('CXX', 'g++')} failed: {error.stderr[-2000:]}"
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
        if self.failure:
            _tracing.info("programs run in Python: %s", self.failure)

    def _begin(self, choice: str) -> None:
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        if choice == "never":
            self.failure = "PPFUNC_NATIVE is 'never'"
        elif sys.platform != "linux" or not compiler or shutil.which(compiler[0]) is None:
            self.failure = "it is built on Linux, by g++ or the compiler that CXX names"
        elif (folder := _folder()) is None:
            self.failure = "this user has no home folder; PPFUNC_CACHE names another"
        elif _is_whole(file := folder / f"ppfunc-{_key()}.so") or choice == "always":
            self._load(file, *compiler)
        else:
            background = self._load, file, shutil.which("nice") or "env", *compiler
            threading.Thread(target=self._attempt, args=background, name="ppfunc build", daemon=True).start()

    def _load(self, file: Path, *compiler: str) -> None:
        if file.exists() and (file.stat().st_uid != os.geteuid() or file.stat().st_mode & 0o022):
            raise OSError(
                f"{file} is not of this user alone; delete it, or set PPFUNC_CACHE to a folder of yours"
            )
        if not _is_whole(file):
            with _logs.timed(_tracing.info, "built %s for programs in C++", file):
                _build(file, *compiler)
            if not _is_whole(file):
                raise OSError(f"{file} is not as it was written; free some disk, or set PPFUNC_CACHE")
        loader = ExtensionFileLoader("native", str(file))
        spec = spec_from_loader("native", loader)
        assert spec is not None
        loader.exec_module(module := module_from_spec(spec))
        self.make = module.make


library = _Library()
if hasattr(os, "register_at_fork"):  # a thread that a forked process does not have may have held the lock
    os.register_at_fork(after_in_child=lambda: vars(library).update(_beginning=threading.Lock()))


def native(write: Callable[[], tuple[Any, ...] | None]) -> Program | Literal[False] | None:
    """Make the program of a part of a trace.

    Args:
        write: writes its :func:`table`.

    Returns:
        False where Python runs it for good; None until the library is there.
    """
    if library.make is None:
        library.begin()
    if library.make is None:
        return False if library.failure else None
    rows = write()
    if rows is None:
        return False
    try:
        return library.make(*rows)
    except (RuntimeError, TypeError, ValueError):  # an argument of a kind that tables do not hold
        return False


def _folder() -> Path | None:
    """Return the folder of the library; a user without a home lacks it."""
    named = os.environ.get("PPFUNC_CACHE") or os.environ.get("TORCH_EXTENSIONS_DIR")
    try:
        return Path(named or "~/.cache/torch_extensions").expanduser()
    except RuntimeError:
        return None


def _key() -> str:
    """Digest all that the library depends on."""
    parts = (torch.__version__, sysconfig.get_config_var("SOABI"), *_FLAGS, _SOURCE.read_text())
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


def _is_whole(file: Path) -> bool:
    """Tell whether a library is as it was written, by the digest at its end.

    Loading one that was cut short ends the process.
    """
    try:
        content = file.read_bytes()
    except OSError:  # there is none
        return False
    end = len(_ENDING.format(hashlib.sha256().hexdigest()))
    return content[-end:] == _ENDING.format(hashlib.sha256(content[:-end]).hexdigest()).encode()


def _build(file: Path, *compiler: str) -> None:
    """Compile the library. Of processes that begin at the same time one does, and the others wait for it.

    Raises:
        subprocess.CalledProcessError: the compiler has failed.
    """
    import fcntl  # of Linux and its like, where alone it is called

    root = Path(torch.__file__).parent
    includes = (root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
    command = [*compiler, *_FLAGS, *(f"-I{path}" for path in includes), str(_SOURCE), "-o", f"{file}.part"]
    command += [f"-L{root / 'lib'}", *_LIBRARIES]
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(f"{file}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not _is_whole(file):
                # A shell goes on, and holds the lock, if this process ends before the compiler does.
                subprocess.run(
                    ["sh", "-c", _SCRIPT, str(file), *command],
                    check=True,
                    capture_output=True,
                    text=True,
                    errors="replace",
                    process_group=0,
                    pass_fds=(lock.fileno(),),
                )
        finally:
            # Closing it is not enough where a child, forked meanwhile, has it open too.
            fcntl.flock(lock, fcntl.LOCK_UN)


# -- programs as tables: the same operators in the same order as in Python

NONE = -1
"""Stands for the slot of a value that nothing reads."""


def table(
    block: Block, names: tuple[str, ...], title: str, settle: tuple[str, ...]
) -> tuple[Any, ...] | None:
    """Write the table of a program.

    Args:
        block: a part of a trace.
        names: the names of its arguments; ``into`` is no tuple of tensors, but the sums of gradients.
        title: ends with its name.
        settle: names of the arguments whose tensors may come with any strides.

    Returns:
        The arguments of ``make`` of ``native.cpp``; None for a program that calls more than plain operators.
    """
    body = [n for n in block.body if not is_element(n)]
    if others := [n for n in body if not _is_plain(n)]:
        _tracing.info("%s runs in Python, not in C++: it calls %s", title, others[0].target)
        return None
    slots = _Slots(block, body)
    given = [
        ([slots.of(n) for n in row], name in settle)
        for name, row in zip(names, block.arguments, strict=True)
        if name != "into"
    ]
    calls = [slots.call(node) for node in body]
    results = [list(map(slots.of, row)) for row in block.results]
    places = {
        line: place.removeprefix(", called at ")
        for line, node in enumerate(body, 1)
        if (place := node.meta.get("place"))
    }
    sums = len(given) if "into" in names else NONE
    described = f"<{title}>", title.split()[-1], {TRACED_LINES: places}
    return *described, len(slots.numbers), slots.constants, given, sums, calls, results


def _is_plain(node: Node) -> bool:
    if node.op == "call_method":  # it adds gradients up
        return True
    return isinstance(node.target, OpOverload) and node.target is not RECORDING and not is_mutable(node)


class _Slots:
    """Gives each value that is read a slot, and describes calls by slots."""

    def __init__(self, block: Block, body: list[Node]) -> None:
        self.numbers: dict[Node, int] = {}
        self.constants: list[tuple[int, torch.Tensor]] = []
        self._last: dict[Node, Node | None] = {a: n for n in body for a in n.all_input_nodes}
        self._last |= dict.fromkeys(n for row in block.results for n in row if n is not None)

    def of(self, node: Node | None) -> int:
        if node is None or node not in self._last:
            return NONE
        if node not in self.numbers:
            self.numbers[node] = len(self.numbers)
            if node.op == "get_attr":
                self.constants.append((self.numbers[node], node.meta["constant"]))
        return self.numbers[node]

    def call(self, node: Node) -> tuple[Any, ...]:
        """Describe a call: operator, operands, slots of results, whether they are one list, slots to free."""
        read = node.all_input_nodes
        ended = [n for n in read if self._last[n] is node and n.op != "get_attr"]
        if node.op == "call_method":
            _, gradients, numbers, _, fresh = arguments(node)
            dead = [self.numbers[n] for n in ended if n in self.numbers]
            return None, ([self.of(n) for n in gradients], (numbers, fresh)), [], False, dead
        target, args, turned = node.target, arguments(node), ""
        if target is aten.linear.default and [n.meta["val"].dim() for n in read] in ([2, 2], [2, 2, 1]):
            # It calls this in the end.
            target, turned = (aten.mm if len(read) == 2 else aten.addmm).default, "mat2"
            args = (*read[2:], *read[:2])
        operator = schema(target)
        given = dict(zip((a.name for a in operator.arguments), args, strict=False))
        given |= {} if turned else node.kwargs
        uses = Counter(id(value) for value in given.values())
        lists = (value for value in given.values() if isinstance(value, list | tuple))
        listed = {n for value in lists for n in value if isinstance(n, Node)}
        taken = {n for n in ended if uses[id(n)] == 1 and n not in listed}
        operands = tuple(
            self._operand(given[a.name], taken, a.name == turned) if a.name in given else ("default",)
            for a in operator.arguments
        )
        dead = [self.of(n) for n in ended if n not in taken]
        one_list = len(operator.returns) == 1 and isinstance(node.meta["val"], list | tuple)
        results: list[Node | None] = [node]
        if "results" in node.meta:
            elements = {n.args[1]: n for n in node.users if is_element(n)}
            results = [elements.get(i) for i in range(node.meta["results"])]
        made = list(map(self.of, results))
        return (operator.name, operator.overload_name), operands, made, one_list, dead

    def _operand(self, value: Any, taken: set[Node], turned: bool) -> tuple[Any, ...]:
        if isinstance(value, Node):
            return "transposed" if turned else "slot", self.of(value), value in taken
        if isinstance(value, list | tuple) and any(isinstance(v, Node) for v in value):
            return "slots", list(map(self.of, value))
        return "constant", value
