"""Load a tree of tensors: from boxes in files into the boxes that this rank holds."""

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch

from ppfunc._checks import naming_arguments, require_type
from ppfunc.runtime.lowering.comparison import differences
from ppfunc.stage.layout import distributed, layout_of, local
from ppfunc.stage.signature import first_match

from .foreign import holds_model_files, open_dcp, open_model_files
from .naming import Leaf, Names, escaped, listed, named_leaves
from .peers import CheckpointError, Group, Peers, RankError
from .saving import Leaves, log
from .storage import (
    MANIFEST,
    Box,
    Contents,
    Part,
    Reader,
    Stored,
    box_of,
    checkpoints,
    in_threads,
    open_checkpoint,
    reader_of,
    reading,
    step_of,
    verify,
)

T = TypeVar("T")
_COUNT = r"optimizer\.(.*\.)?updates"


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
        run: id of the run of the checkpoint; by default of any run.
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
    root = _path(folder).absolute()

    def find() -> list[Path]:
        if not root.is_dir():
            raise FileNotFoundError(f"folder: {root} is no folder; give one that save or export has written")
        alone = step_of(root) is not None or (root / MANIFEST).exists() or holds_model_files(root)
        return [root] if alone else checkpoints(root)

    return _load(root, like, names, group, run, partial, find, _open)


@naming_arguments
def from_dcp(
    folder: str | Path, like: Any, *, names: Names = None, group: Group = None, partial: str | None = None
) -> Any:
    """Load tensors from a folder of ``torch.distributed.checkpoint``, as torchtitan and FSDP write them.

    All ranks call it, on any grid, and each reads what it holds. If it raises, it raises on all ranks. No
    code in the folder is run: Python objects in it, such as torchtitan's ``train_state``, are never read,
    and ``.metadata`` may name nothing but what DCP writes there. There are no digests.

    Args:
        folder: folder with the file ``.metadata``.
        like: ``{stage: tree}`` of this process, such as ``split.params``, or any other tree of tensors. Its
            names, shapes and dtypes have to be those of the folder, all of them; layouts and devices are its
            own.
        names: see :func:`ppfunc.checkpoint.save`; with a prefix, a function:
            ``lambda stage, leaf: f"model.{leaf}"``. Moments of AdamW are trees like the parameters:
            ``lambda stage, leaf: f"optimizer.state.{leaf}.exp_avg"``.
        group: see :func:`ppfunc.checkpoint.save`.
        partial: see :func:`ppfunc.checkpoint.load`; an object that is left out needs a pattern as well.

    Returns:
        The tree, of new tensors, with the structure and the layouts of ``like``.

    Raises:
        CheckpointError: the folder is damaged or foreign, or names what DCP does not write.
        ValueError: names, shapes or dtypes of ``like`` are not those of the folder.

    >>> import tempfile, ppfunc as pp
    >>> with tempfile.TemporaryDirectory() as root:
    ...     folder = pp.checkpoint.to_dcp(f"{root}/new", {0: {"w": torch.ones(2)}}, {0: {"w": "h.0.weight"}})
    ...     from_dcp(folder, {"h.0.weight": torch.zeros(2)})
    {'h.0.weight': tensor([1., 1.])}
    """
    root = _path(folder).absolute()
    return _load(root, like, names, group, None, partial, lambda: [root], open_dcp)


@naming_arguments
def latest(folder: str | Path) -> Path | None:
    """Find the latest checkpoint in a folder whose bytes are all as they were written.

    This process alone reads and verifies it. :func:`load` does the same, with each rank reading its own part.

    Args:
        folder: the folder given to :func:`save`.

    Returns:
        The folder of the checkpoint; None if there are no checkpoints.

    Raises:
        CheckpointError: all checkpoints are damaged, or cannot be read.
    """
    return _first_good(checkpoints(_path(folder)), lambda path: verify(path) and path, folder)


def _path(folder: Any) -> Path:
    require_type("folder", folder, str | PathLike, "a path; where there is no checkpoint, latest() is None")
    return Path(folder)


def _first_good(paths: Iterable[Path], read: Callable[[Path], T], folder: object) -> T | None:
    """Return the result of ``read`` for the first checkpoint that it accepts.

    Warns of each checkpoint that it refuses.

    Returns:
        The result; None without checkpoints.

    Raises:
        CheckpointError: it refuses all.
    """
    refused: list[str] = []
    for path in paths:
        try:
            result = read(path)
        except RankError:
            raise
        except CheckpointError as error:
            refused.append(str(error))
            continue
        if refused:
            warnings.warn(
                f"{path} is the latest good checkpoint; refused: {'; '.join(refused)}", stacklevel=4
            )
        return result
    if refused:
        raise CheckpointError(f"{folder} has no good checkpoint; refused: {'; '.join(refused)}")
    return None


def _load(
    folder: Path,
    like: Any,
    names: Names,
    group: Group,
    run: str | None,
    partial: str | None,
    find: Callable[[], list[Path]],
    opener: Callable[[Path], tuple[Contents, Reader]],
) -> Any:
    """Load a state; see :func:`load`.

    Args:
        find: function that lists the folders to try on the first rank, the latest first.
        opener: function that finds the contents of a folder, and the way to read its tensors.
    """
    require_type("partial", partial, str | None, 'patterns in one text, such as "optimizer.*|step"')
    found: list[Any] = []

    def look() -> tuple[dict[str, str], list[str]]:
        found[:] = named_leaves(like, names, "like")
        return {name: _form(leaf) for name, leaf in found[0]}, [] if peers.rank else list(map(str, find()))

    with Peers(group) as peers:
        answers = peers.together(look)
        leaves, treedef = found
        wanted = _wanted([forms for forms, _ in answers])

        def read(path: Path) -> list[Leaf]:
            loaded: list[Leaf] = []
            messages: list[str] = []

            def read_own() -> str:
                contents, reader = opener(path)
                if run is not None and contents.run != run:
                    raise ValueError(
                        f"run: got {run!r}, and {path} is a checkpoint of the run {contents.run!r}; give that"
                        " run, or none"
                    )
                messages.append(_require_fit(path.name, contents, wanted, partial))
                loaded.extend(_read(path.name, contents, leaves, reader))
                return sha256(repr(contents).encode()).hexdigest()

            digests = peers.together(read_own)
            if other := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
                raise CheckpointError(
                    f"{path} is another checkpoint on rank {other[0]} than on rank 0; give a folder that all"
                    " ranks share"
                )
            log.info("read %s", path)
            if messages[0]:
                warnings.warn(messages[0], stacklevel=5)
            return loaded

        paths = list(map(Path, answers[0][1]))
        loaded = read(folder) if paths == [folder] else _first_good(paths, read, folder)
    if loaded is None:
        raise FileNotFoundError(f"{folder} has no checkpoint; give a folder that save or export has written")
    return treedef.unflatten(loaded)


def _open(path: Path) -> tuple[Contents, Reader]:
    with reading(escaped(path)):
        of_a_model = holds_model_files(path) and not (path / MANIFEST).exists()
    return open_model_files(path) if of_a_model else (open_checkpoint(path), reader_of(path))


def _read(where: str, contents: Contents, leaves: Leaves, read: Reader) -> list[Leaf]:
    loaded: list[Leaf] = []
    tasks: list[tuple[str, Part, torch.Tensor, Box]] = []
    for name, leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            loaded.append(contents.values.get(name, leaf))
            continue
        part = local(leaf).detach()
        if name not in contents.tensors:
            if part.is_meta:
                raise ValueError(
                    f"like: {escaped(name)}, which {where} lacks, has no values on meta; give a tensor with"
                    " values, such as of trainer.init(params)"
                )
            loaded.append(distributed(part.clone(), layout_of(leaf)))
            continue
        new = torch.empty_like(part, device="cpu" if part.is_meta else part.device)
        box = box_of(leaf, escaped(name))
        tasks += [(name, stored, new, box) for stored in contents.tensors[name].parts if stored.box & box]
        loaded.append(distributed(new, layout_of(leaf)))

    def read_into(task: tuple[str, Part, torch.Tensor, Box]) -> None:
        name, stored, into, box = task
        buffer = into
        if stored.box != box or into.device.type != "cpu" or not into.is_contiguous():
            buffer = torch.empty(stored.box.shape, dtype=into.dtype, device="cpu")
        read(name, stored, buffer)
        if buffer is not into and (shared := stored.box & box):
            into[shared.within(box)] = buffer[shared.within(stored.box)].to(into.device)

    in_threads(read_into, tasks)
    return loaded


# -- whether both sides fit


def _form(leaf: Leaf) -> str:
    if isinstance(leaf, torch.Tensor):
        return str(Stored(leaf.dtype, tuple(leaf.shape)))
    return f"a number or text, {type(leaf).__name__}"


def _wanted(answers: list[dict[str, str]]) -> dict[str, tuple[str, str]]:
    """Return the form of every leaf by its name, and of several ranks the first that has it, for errors."""
    places = [f" on rank {rank}" if len(answers) > 1 else "" for rank in range(len(answers))]
    by_place = list(zip(places, answers, strict=True))
    for name, (one, known), (other, form) in differences(by_place):
        raise ValueError(
            f"like: {escaped(name)} is {form}{other}, and {known}{one}; give all ranks the state of one"
            " trainer"
        )
    return {name: (form, place) for place, forms in reversed(by_place) for name, form in forms.items()}


def _require_fit(
    where: str, contents: Contents, wanted: Mapping[str, tuple[str, str]], partial: str | None
) -> str:
    """Raise ValueError unless names, shapes and dtypes are the same on both sides.

    Returns:
        What only one side has, which these patterns allow; "" for nothing.
    """
    stored = {name: str(tensor) for name, tensor in contents.tensors.items()}
    stored |= {name: _form(value) for name, value in contents.values.items()}
    stored |= dict.fromkeys(contents.objects, "a pickled object, which is never read")
    mend = (
        "load what was saved: of the same optimizer and version of ppfunc, scale and stages, with the same"
        " names=; names=split, of each split, in save and load is for other stages; pp.checkpoint.export"
        " writes parameters alone; partial= takes a part"
    )
    missing, more = wanted.keys() - stored.keys(), stored.keys() - wanted.keys()
    patterns = [] if partial is None else partial.split("|")
    matched = {name: first_match(name, patterns) for name in missing | more}
    if refused := sorted(name for name in missing if matched[name] is None):
        tails = tuple(f".{name}" for name in refused[:3])
        near = [name for name in more if name.endswith(tails)] or get_close_matches(refused[0], sorted(more))
        has = f", and has {listed(near)}" if near else ""
        raise ValueError(
            f"{where} lacks {listed(refused)}, which like has{wanted[refused[0]][1]}{has}; {mend}"
        )
    if refused := [name for name in more if matched[name] is None]:
        raise ValueError(f"like lacks {listed(refused)}, which {where} has; {mend}")
    for pattern in patterns:
        if pattern not in matched.values():
            raise ValueError(f"partial: {pattern!r} names nothing that {where} or like lacks; leave it out")
    if not wanted.keys() & stored.keys():
        raise ValueError(f"partial: nothing of like is in {where}: {listed(missing)}; {mend}")
    for name in wanted.keys() & stored.keys():
        if stored[name] != wanted[name][0]:
            raise ValueError(
                f"{where}: {escaped(name)} is {stored[name]}, like has {wanted[name][0]}; give like= a leaf"
                " of that form, or none"
            )
    _require_whole(where, wanted, missing)
    left, unchanged = (f"{listed(names)}" if names else "nothing" for names in (more, missing))
    return f"{where} was loaded in part: left out {left}; as in like stays {unchanged}" if matched else ""


def _require_whole(where: str, wanted: Iterable[str], missing: Collection[str]) -> None:
    """Raise ValueError for an optimizer of which only a part is loaded: its count belongs to its moments."""
    counts = [name.removesuffix("updates") for name in wanted if re.fullmatch(_COUNT, name)]
    lacking, taken = dict[str, list[str]](), dict[str, str]()
    for name in wanted if missing and counts else ():
        state = max((count for count in counts if name.startswith(count)), key=len, default="")
        if name in missing and state:
            lacking.setdefault(state, []).append(name)
        elif name not in missing:
            taken.setdefault(state, name)
    for state in sorted(lacking.keys() & taken.keys()):
        raise ValueError(
            f"partial: {where} lacks {listed(lacking[state])}, and has {escaped(taken[state])} of the same"
            ' optimizer, which is loaded whole or not at all; load {"params": params} with'
            ' partial="optimizer.*|step", and begin with trainer.init'
        )
