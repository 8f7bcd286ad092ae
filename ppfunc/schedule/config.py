"""Make the schedule that a configuration names, by builder or file, and the split of the model that goes with
it.
"""

import inspect
import os
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ppfunc._text import suggestion
from ppfunc.parallel.counts import require_counts
from ppfunc.parallel.stack import count_stages, partition_layers

from .arguments import require_type
from .builders import BUILDERS
from .formats.files import read_csv
from .schedule import Schedule

# Names of torch.distributed.pipelining that are not those of our builders in another spelling.
_NAMES_IN_TORCH = {"interleavedzerobubble": "interleaved_zb", "zbvzerobubble": "zbv"}


_KEYS = ("schedule", "ranks", "batch_size", "microbatch_size")
_MORE = ("options", "layers", "layers_per_stage", "input_weight", "output_weight", "split_points")


class Configured(NamedTuple):
    """A schedule, and where to split the model for it.

    Args:
        schedule: the program of every rank.
        split_points: names of the layers that begin the stages after the first, for
            ``ppfunc.split(model, args, at=...)``; None for a configuration without layers.
    """

    schedule: Schedule
    split_points: tuple[str, ...] | None


def configure(config: Mapping[str, Any]) -> Configured:
    """Make the schedule and the split of the model that a configuration describes.

    Args:
        config: a mapping, such as a JSON or TOML file holds, with these keys.

            * ``schedule``: the name of a builder, as ``ppfunc list`` prints it or as
              ``torch.distributed.pipelining`` spells it; the path of a CSV file, as a ``Path`` or as text
              with a ``/`` in it or ``.csv`` at its end; or a builder
              ``(ranks, microbatches, **options) -> Schedule``.
            * ``ranks``: number of ranks of the pipeline.
            * ``batch_size``: samples that one pipeline takes in a step.
            * ``microbatch_size``: samples in a microbatch, a divisor of ``batch_size``.
            * ``options``: a mapping with further arguments of the builder.
            * ``split_points``, or ``layers`` and perhaps ``layers_per_stage`` (as of ``count_stages``),
              ``input_weight`` and ``output_weight`` (as of ``partition_layers``). They also give
              ``chunks`` to a builder that takes it, unless the options have it.

    Raises:
        ValueError: an unknown or missing key, sizes that do not divide, an unknown name, a file for another
            number of ranks or microbatches, stages that are not those of the schedule.
        FileNotFoundError: no file is at the path.

    Warns:
        UserWarning: for fewer microbatches than stages, which leave a bubble in the pipeline.

    >>> sizes = {"ranks": 4, "batch_size": 8, "microbatch_size": 1, "layers": 8}
    >>> configured = configure({"schedule": "1F1B", **sizes})
    >>> configured.schedule.name, configured.split_points
    ('one_f_one_b', ('layers.1', 'layers.4', 'layers.7'))
    """
    _require_keys(config)
    source, ranks, layers = config["schedule"], config["ranks"], config.get("layers")
    points, options = config.get("split_points"), dict(config.get("options", {}))
    microbatches = _count_microbatches(config["batch_size"], config["microbatch_size"])
    schedule = _built(source, ranks, microbatches, options)
    stages = None if points is None else len(points) + 1
    if "layers_per_stage" in config:
        several = len(set(schedule.model_stages)) > ranks
        stages = count_stages(
            config["layers"], ranks, several=several, layers_per_stage=config["layers_per_stage"]
        )
    if stages is not None and not stages % ranks and _takes_chunks(source) and "chunks" not in options:
        schedule = _built(source, ranks, microbatches, options | {"chunks": stages // ranks})
    expected = len(set(schedule.model_stages))
    if stages not in (None, expected):
        raise ValueError(
            f"the configuration cuts the model into {stages} stages, but {schedule.name} has {expected} on"
            f" {ranks} ranks; give as many split points or layers per stage"
        )
    _warn_of_bubble(schedule, config["batch_size"])
    if layers is not None:
        ends = config.get("input_weight", 1), config.get("output_weight", 1)
        points = partition_layers(layers, expected, *ends).split_points()
    return Configured(schedule, None if points is None else tuple(points))


def _require_keys(config: Mapping[str, Any]) -> None:
    """Raise ValueError where a configuration has a key that nothing would honour, or lacks one."""
    require_type("config", config, Mapping, "a mapping such as the object in a JSON file")
    known = (*_KEYS, *_MORE)
    for key in config:
        if key not in known:
            raise ValueError(
                f"unknown key {key!r}: expected some of {', '.join(known)}{suggestion(str(key), known)}"
            )
    if missing := [key for key in _KEYS if key not in config]:
        raise ValueError(f"the configuration lacks {', '.join(missing)}")
    of_layers = [key for key in ("layers_per_stage", "input_weight", "output_weight") if key in config]
    if of_layers and "layers" not in config:
        raise ValueError(f"the configuration has {of_layers[0]}, and no number of layers; give layers=")
    if "split_points" in config and "layers" in config:
        raise ValueError(
            "the configuration has split_points and layers, from which they would follow; leave one of the"
            " two out"
        )


def _takes_chunks(schedule: Any) -> bool:
    """Tell whether a schedule comes from a builder that takes ``chunks``; a file does not."""
    if not callable(schedule):
        if not isinstance(schedule, str) or _is_path(schedule):
            return False
        schedule = find_builder(schedule)
    return "chunks" in inspect.signature(schedule).parameters


def _count_microbatches(batch_size: int, microbatch_size: int) -> int:
    require_counts(batch_size=batch_size, microbatch_size=microbatch_size)
    if batch_size % microbatch_size:
        raise ValueError(
            f"a batch of {batch_size} samples does not divide into microbatches of {microbatch_size}: use a"
            f" microbatch size that divides {batch_size}, or a batch size that is a multiple of"
            f" {microbatch_size}"
        )
    return batch_size // microbatch_size


def find_builder(name: str) -> Callable[..., Schedule]:
    """Find a builder by its name in any spelling.

    ``"1f1b"``, ``"Schedule1F1B"`` and ``"one_f_one_b"`` are the same builder.

    Raises:
        ValueError: for an unknown name, with the known ones and the most similar.
    """
    require_type("name", name, str, "that of a schedule, such as '1f1b'")
    spellings = {_plain(builder.__name__): builder for builder in BUILDERS.values()}
    spellings |= {_plain(known): builder for known, builder in BUILDERS.items()}
    spellings |= {theirs: BUILDERS[ours] for theirs, ours in _NAMES_IN_TORCH.items()}
    plain = _plain(name)
    if plain not in spellings:
        raise ValueError(
            f"unknown schedule {name!r}: expected one of {', '.join(BUILDERS)}{_nearest(name.lower())}"
        )
    return spellings[plain]


def _built(schedule: Any, ranks: int, microbatches: int, options: dict[str, Any]) -> Schedule:
    """Return the schedule of a builder, of its name, or of a file."""
    if callable(schedule):
        return schedule(ranks, microbatches, **options)
    if isinstance(schedule, str) and not _is_path(schedule):
        return find_builder(schedule)(ranks, microbatches, **options)
    if options:
        raise ValueError(f"a schedule that is read from {schedule} takes no options, got {sorted(options)}")
    return _read(Path(schedule), ranks, microbatches)


def _warn_of_bubble(schedule: Schedule, batch_size: int) -> None:
    """Warn the caller of ``configure`` of fewer microbatches than stages."""
    stages = len(schedule.placement)
    if schedule.microbatches < stages:
        warnings.warn(
            f"{schedule.microbatches} microbatches are fewer than the {stages} stages of {schedule.name},"
            f" which leaves a bubble in the pipeline: a microbatch size of {max(1, batch_size // stages)} or"
            " less makes more of them",
            stacklevel=3,
        )


def _is_path(schedule: str) -> bool:
    return os.sep in schedule or schedule.lower().endswith(".csv")


def _read(path: Path, ranks: int, microbatches: int) -> Schedule:
    if not path.is_file():
        raise FileNotFoundError(f"there is no schedule at {path}: expected the path of a CSV file")
    schedule = read_csv(path)
    for what, expected in (("ranks", ranks), ("microbatches", microbatches)):
        if getattr(schedule, what) != expected:
            raise ValueError(
                f"the schedule in {path} is for {getattr(schedule, what)} {what}, but the configuration has"
                f" {expected}"
            )
    return schedule


def _nearest(name: str) -> str:
    """Suggest the first builder whose name begins so, else the most similar."""
    return suggestion(next((known for known in BUILDERS if known.startswith(name)), name), BUILDERS)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("schedule")
