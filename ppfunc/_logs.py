"""Log lowered steps, traced stages, open communicators, plans, checkpoints and failures, each in its room: a
logger of Python's ``logging``.

Nothing is shown unless asked: by a handler and a level of ``logging.getLogger("ppfunc")``, or by the
environment, as torch's ``TORCH_LOGS``::

    PPFUNC_LOGS=lowering,+control python train.py
    PPFUNC_FLIGHT=failures.log python train.py

The first shows rooms on stderr, with ``+`` the details of a room too; ``all`` is each. The second writes
``control`` with its details, of all ranks, to a file. The rooms, below the logger ``ppfunc``:

* ``lowering``: steps that were lowered and compiled, the seconds it took, and the change that asked for it
* ``tracing``: stages that were traced and compiled; programs that Python runs, and why
* ``transport``: communicators that were opened and ended
* ``planning``: plans and configurations that were chosen
* ``checkpoint``: checkpoints that were written, read and removed
* ``control``: failures of a step, with the place of each

Each record has the ``rank`` of its process. Nothing is logged in a step whose form has run before, unless it
fails: then ``control`` has the place of the failure and, as details, the last instructions of each rank.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from ._checks import require_one_of

ROOMS = ("lowering", "tracing", "transport", "planning", "checkpoint", "control")


def room(name: str) -> logging.Logger:
    """Return the logger of a room."""
    logger = logging.getLogger(f"ppfunc.{name}")
    logger.addFilter(_add_rank)
    return logger


def _add_rank(record: logging.LogRecord) -> bool:
    """Give a record the rank of this process: torch.distributed's, or else torchrun's."""
    distributed = sys.modules.get("torch.distributed")
    known = distributed and distributed.is_available() and distributed.is_initialized()
    told = os.environ.get("RANK", "")
    record.rank = distributed.get_rank() if known and distributed else int(told) if told.isdigit() else 0
    return True


# Without a parent: a file of failures changes nothing of what other handlers are given.
flight = logging.Logger("ppfunc.control")
flight.addFilter(_add_rank)
flight.disabled = True


@contextmanager
def timed(log: Callable[..., None], text: str, *args: object) -> Iterator[None]:
    """Log a text with the seconds that the block took, unless it raises.

    Args:
        log: method of a logger, such as ``info``.
        text, args: format of a record, and its arguments.
    """
    begun = perf_counter()
    yield
    log(f"{text} in %.3f s", *args, perf_counter() - begun)


def _configure(rooms: str | None, failures: str | None) -> None:
    """Add the handlers that the environment asks for.

    Args:
        rooms: names of rooms, separated by commas.
        failures: path of the file for failures.

    Raises:
        ValueError: a room with another name; a file that cannot be written.
    """
    whole = logging.getLogger("ppfunc")
    whole.addHandler(logging.NullHandler())
    form = logging.Formatter("[rank%(rank)s] %(asctime)s %(name)s: %(message)s", "%H:%M:%S")
    handlers: list[tuple[logging.Logger, logging.Handler]] = []
    for name in filter(None, map(str.strip, (rooms or "").split(","))):
        bare = name.removeprefix("+")
        require_one_of("PPFUNC_LOGS", bare, [*ROOMS, "all"])
        for each in ROOMS if bare == "all" else [bare]:
            room(each).setLevel(logging.INFO if name == bare else logging.DEBUG)
        whole.propagate = False  # else handlers of the root would show them again
        handlers = [(whole, logging.StreamHandler())]
    if failures:
        flight.disabled = False
        try:
            handlers.append((flight, logging.FileHandler(failures)))
        except OSError as error:
            expected = f"expected the path of a file to write: {error.strerror}"
            raise ValueError(f"PPFUNC_FLIGHT: got {failures!r}, {expected}") from None
    for logger, handler in handlers:
        handler.setFormatter(form)
        logger.addHandler(handler)


_configure(os.environ.get("PPFUNC_LOGS"), os.environ.get("PPFUNC_FLIGHT"))
