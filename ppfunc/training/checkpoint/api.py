"""Save and load training states: ``save``, ``save_async`` and ``load``."""

import atexit
import threading
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from ppfunc._checks import naming_arguments

from .loading import load_tree
from .naming import Names
from .peers import Group, Peers
from .saving import SaveWork, prepare, write


@naming_arguments
def save(
    folder: str | Path,
    state: Any,
    keep: int | None = 3,
    *,
    step: int | None = None,
    names: Names = None,
    group: Group = None,
    run: str | None = None,
) -> Path:
    """Write a state to ``folder/step-N``. The checkpoint appears when it is complete and flushed.

    All ranks call it between steps, each with its own part of the state; a handler of a signal sets a flag
    for that. A plain tensor is the same on all ranks that hold it. Each element is written once. The
    checkpoint can be loaded into any state with the same names, under another schedule, sharding or number
    of ranks; with ``names``, also into other stages.

    Args:
        folder: of all checkpoints of a run, on a disk that all ranks share.
        state: a tree of tensors, numbers and texts, such as a :class:`ppfunc.TrainState`, or a dictionary of
            one and the position in the data.
        keep: number of checkpoints that stay; those of the earliest steps are deleted. None keeps all. A
            checkpoint counts if its files have their sizes. Their bytes are not read again: with 1, nothing
            is left to fall back to if the disk damages the last one.
        step: number of the checkpoint; by default the leaf of the state that is called ``step``, or else that
            of the one TrainState in it, which does not count skipped updates.
        names: names of the parameters that do not depend on the stages: a :class:`ppfunc.Split`,
            ``{stage: {name of a leaf: name in the model}}``, or such a function of stage and name. By default
            a name has its stage, and is loaded into the same stages only.
        group: the ranks that save: a mesh or a process group; by default all, or this process where
            ``torch.distributed`` is not initialised.
        run: a text that names the run, such as an id of the job; a folder holds the checkpoints of one run.

    Returns:
        The folder of the checkpoint.

    Raises:
        FileExistsError: a good checkpoint of this step, or of a later one, is there. Damaged ones are put
            aside.
        ValueError, TypeError: names, shapes or values that do not fit together, which are named; a folder of
            another run.
        CheckpointError: another rank is gone, or has failed in another way.
        OSError: the disk of this rank is full, or does not work.

    One job at a time saves into a folder: a save deletes what other writers have begun there.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as runs:
    ...     path = save(runs, {"w": torch.ones(2), "batch": 7}, step=1)
    ...     path.name, load(runs, like={"w": torch.zeros(2), "batch": 0})
    ('step-1', {'w': tensor([1., 1.]), 'batch': 7})
    """
    _end_last()
    with Peers(group) as peers, ExitStack() as stack:
        return write(peers, prepare(peers, folder, state, step, keep, names, run, None, stack))


@naming_arguments
def save_async(
    folder: str | Path,
    state: Any,
    keep: int | None = 3,
    *,
    step: int | None = None,
    names: Names = None,
    group: Group = None,
    run: str | None = None,
) -> "Saving":
    """Begin to save a state as :func:`save` does. Return once it is copied to the memory of the host.

    A thread does the rest, over a process group of its own, while training goes on. One save is under way at
    a time. The next one, and the end of the program, wait for it. They warn if it has failed, unless
    :meth:`Saving.result` has raised its error. Call ``result`` of the last save before
    ``destroy_process_group``. The memory of the copies is kept for the next save.

    Args:
        folder, state, keep, step, names, group, run: as for :func:`save`.
    """
    with _lock, ExitStack() as stack:
        _end_last()
        peers, spare = stack.enter_context(Peers(group)), dict(_spare)
        _spare.clear()  # memory that a thread may still read is never that of the next save
        work = prepare(peers, folder, state, step, keep, names, run, spare, stack)
        _under_way.append(Saving(peers, work, stack.pop_all()))
        return _under_way[0]


class Saving:
    """Handle a save that is under way: made by :func:`save_async`."""

    def __init__(self, peers: Peers, work: SaveWork, stack: ExitStack) -> None:
        self._copies = work.mine
        self._target = work.contents.folder
        self._error: BaseException | None = None
        self._seen = False
        self._ended = threading.Event()  # a thread whose join is interrupted is taken for one that has ended
        threading.Thread(
            target=self._run, args=(peers, work, stack), name=f"ppfunc {self._target.name}"
        ).start()

    def _run(self, peers: Peers, work: SaveWork, stack: ExitStack) -> None:
        try:
            with stack:
                write(peers, work)
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def __repr__(self) -> str:
        state = "under way" if not self.done() else "failed" if self._error else "done"
        return f"<save of {self._target}, {state}>"

    def done(self) -> bool:
        """Tell whether the save has ended, well or not."""
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> Path:
        """Wait until the save has ended, at most ``timeout`` seconds.

        Returns:
            The folder of the checkpoint, which is on the disk.

        Raises:
            TimeoutError: it has not ended.
            Exception: as :func:`save`.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the save of {self._target} has not ended within {timeout} s")
        self._seen = True
        if self._error is not None:
            raise self._error
        return self._target

    def end(self) -> dict[str, Tensor]:
        """Wait until it has ended, warn of a failure that nobody has seen, and hand over the copies."""
        self._ended.wait()
        if self._error is not None and not self._seen:
            self._seen = True
            warnings.warn(
                f"{self._target} was not saved: {type(self._error).__name__}: {self._error}", stacklevel=4
            )
        copies, self._copies = self._copies, {}
        return copies


_lock = threading.RLock()  # held while a save begins
_under_way: list[Saving] = []  # at most one
_spare: dict[str, Tensor] = {}  # memory of the copies of the last one


@atexit.register
def _end_last() -> None:
    """Wait for the save of this process that is under way, and warn if it has failed."""
    with _lock:
        for saving in _under_way:
            _spare.update(saving.end())
        _under_way.clear()  # not before: who interrupts the wait may save again


@naming_arguments
def load(
    folder: str | Path,
    like: Any,
    *,
    names: Names = None,
    group: Group = None,
    run: str | None = None,
    partial: str | None = None,
) -> Any:
    """Load a state. Every rank reads its own part, and verifies every byte that it reads.

    All ranks call it. It returns new tensors. If it raises, it raises on all ranks, and nothing has changed.

    Args:
        folder: the folder given to :func:`save`, whose latest good checkpoint is loaded, with a warning if
            later ones are damaged; or one checkpoint, such as :func:`latest` returns; or a folder of
            safetensors files under a model's own names, as :func:`export` and Hugging Face write them, which
            have no digests.
        like: a state of the form to load, such as ``trainer.init(params)``. Its names, shapes and dtypes have
            to be those of the checkpoint, all of them; layouts over a mesh and devices are its own.
        names, group: see :func:`save`.
        run: of which the checkpoint has to be; by default of any.
        partial: patterns of names that only one side may have, as of a shell, alternatives divided by ``|``:
            ``"optimizer.*|step"``. Those of the checkpoint are left out, those of ``like`` stay as they are,
            and a warning lists both. What an optimizer counts and averages is loaded whole or not at all.
            Parameters alone: ``load(folder, {"params": params}, partial="optimizer.*|step")["params"]``.

    Returns:
        The state, with the structure and the layouts of ``like``.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: a checkpoint is damaged, uncommitted or foreign; names the file or the tensor.
        ValueError: names, shapes or dtypes of ``like`` are not those of the checkpoint; it is of another run;
            a pattern of ``partial`` that no missing name matches; an optimizer of which it takes a part.
    """
    with Peers(group) as peers:
        return load_tree(peers, Path(folder).absolute(), like, names, run, partial)
