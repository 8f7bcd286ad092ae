"""The copies of a stage: their gradients are added up, so their parameters have to be the same."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch

from ppfunc.schedule import Schedule
from ppfunc.stage import Signature

from .arguments import Arguments
from .calls import Leaves
from .errors import AgreementError
from .transport import as_bytes

Description = tuple[str, int]
"""The form of parameters, and a number that tells other values from the same ones."""


def copied(schedule: Schedule, params: Mapping[int, Signature]) -> dict[int, Signature]:
    """What of these belongs to stages whose gradients are added up with those of copies."""
    groups = () if schedule.forward_only else schedule.replicas
    return {stage: params[stage] for group in groups for stage in group if stage in params}


def described(schedule: Schedule, local: Set[int], arguments: Arguments) -> dict[int, Description]:
    """The parameters of such stages of this process; their values count where copies live in other processes."""
    home = schedule.placement
    apart = {stage for group in schedule.replicas if {home[s] for s in group} - local for stage in group}
    return {
        stage: (_form(signature), _sum_of_bytes(arguments.leaves[stage]) if stage in apart else 0)
        for stage, signature in copied(schedule, arguments.signatures).items()
    }


def require_alike(schedule: Schedule, found: Mapping[int, Description]) -> None:
    """Raise unless all copies have the same parameters.

    Args:
        schedule: the schedule.
        found: those of every stage with copies, on whatever rank; empty where no gradients are added up.

    Raises:
        AgreementError: two differ.
    """
    for group in schedule.replicas if found else ():
        for other in group[1:]:
            (mine, _), (theirs, _) = found[group[0]], found[other]
            if found[other] != found[group[0]]:
                raise AgreementError(
                    f"the parameters of stage {group[0]} and those of its copy, stage {other}, differ in "
                    f"{'their values' if mine == theirs else f'form, ({mine}) and ({theirs})'}; give both the same"
                )


def _form(signature: Signature) -> str:
    """Each leaf with its path, in an order that does not depend on that in which a dictionary was filled."""
    return ", ".join(f"{path}: {leaf}" for path, leaf in zip(signature.paths, signature.leaves, strict=True)) or "nothing"


def _sum_of_bytes(leaves: Leaves) -> int:
    """The same on every device."""
    plain = (t.detach().resolve_conj().resolve_neg().contiguous() for t in leaves)
    return sum(int(as_bytes(t).sum(dtype=torch.int64)) for t in plain)
