"""Build guard.cpp once, load it, and install what answers its calls."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

_SOURCE = Path(__file__).with_name("guard.cpp")
_FAILED = -(2**63)
_Call = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
_NAMES = (
    "get_device set_device get_stream exchange_stream new_stream count"
    " record block query destroy elapsed synchronize_event"
    " synchronize_stream synchronize_device query_stream capturing"
).split()
_kept: list[Any] = []


class _Calls(ctypes.Structure):
    _fields_ = [(name, _Call) for name in _NAMES]


def missing() -> str | None:
    """Return why no accelerator can be simulated here, or None."""
    if torch.version.cuda or torch.version.hip:
        return "this wheel of torch has kernels for the device"
    if not shutil.which("g++"):
        return "there is no g++"
    return None


def build() -> Path:
    """Compile the library into a directory of this user, once for a source and a version of torch."""
    home = Path(tempfile.gettempdir()) / f"simulated-accelerator-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    digest = hashlib.sha256(_SOURCE.read_bytes() + torch.__file__.encode() + torch.__version__.encode())
    target = home / f"guard-{digest.hexdigest()[:16]}.so"
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            root, unfinished = Path(torch.__file__).parent, target.with_suffix(".tmp")
            options = f"-std=c++20 -O0 -shared -fPIC -w -I{root}/include -L{root}/lib -lc10 -ltorch_cpu"
            command = ["g++", str(_SOURCE), *options.split(), "-o", str(unfinished)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            unfinished.replace(target)
    return target


@cache
def library() -> Any:
    """Load the library, whose functions keep the lock of the interpreter."""
    loaded = ctypes.PyDLL(str(build()))
    loaded.take_freed.restype = ctypes.c_void_p
    loaded.exchange_memory.argtypes = [ctypes.c_void_p] * 2
    loaded.pinned_number.restype, loaded.pinned_number.argtypes = ctypes.c_int64, [ctypes.c_void_p]
    return loaded


def install(functions: dict[str, Callable[..., int]]) -> None:
    """Answer the calls of the guard by ``functions``, each of three integers.

    To be called before the first backward of a process, in which autograd makes a thread for each device.
    """

    def answering(function: Callable[..., int]) -> Any:
        def call(*arguments: int) -> int:
            try:
                return int(function(*arguments) or 0)
            except BaseException as error:  # goes through C++ as a text
                library().set_error(f"{error}".encode())
                return _FAILED

        return _Call(call)

    calls = _Calls(**{name: answering(functions[name]) for name in _NAMES})
    _kept.append(calls)
    if not library().install(ctypes.byref(calls)):
        raise RuntimeError("the hooks of torch could not be replaced")
    thread = threading.Thread(
        target=_first_backward
    )  # makes the threads of autograd, while the count is high
    thread.start()
    thread.join()


def _first_backward() -> None:
    torch.ones((), requires_grad=True).backward()
