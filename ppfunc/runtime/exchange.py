"""Exchange between processes what stages give: the signatures of edges, the forms of losses and of shared parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ppfunc.schedule import Schedule
from ppfunc.stage import LeafSignature, Signature
from ppfunc.stage.module import frozen_below
from ppfunc.stage.tree import tree_structure

from .errors import AgreementError, Refrozen
from .lowered import LoweredStep
from .ties import leaf_names, require_same_forms, shared_forms, shared_leaves
from .transport import ControlTransport, LossPart

Edges = dict[tuple[int, int], tuple[Signature, ...]]  # by (source, destination), the signature of every microbatch

_MEND = "make a new step function, or trainer, for parameters or targets of other dtypes or shapes"
_LEAF = tree_structure(0)


class Agreed(NamedTuple):
    """Facts that the ranks agreed on for one form of the batch.

    Args:
        generation: failures of the transport before; what was agreed before the last one is of no use.
        edges: the signatures on edges to and from other processes.
        parts: the form of the losses of all ranks.
        shared: the forms of parameters that other processes hold too.
        frozen: what the modules of this process had frozen, by stage of the model and name.
    """

    generation: int
    edges: Edges
    parts: dict[int, LossPart]
    shared: Mapping[str, str]
    frozen: frozenset[tuple[int, str]]


class Negotiation:
    """Passes signatures from process to process, and remembers them: the ranks have not agreed on this form of the batch.

    Args:
        schedule: says which rank has which stage.
        control: carries the texts.
        generation: failures before.
    """

    def __init__(self, schedule: Schedule, control: ControlTransport, generation: int) -> None:
        self._schedule, self._control, self._generation = schedule, control, generation
        self._agreed: Edges = {}
        self._early: Edges = {}

    def send(self, edge: tuple[int, int], signatures: Sequence[Signature]) -> None:
        self._agreed[edge] = tuple(signatures)
        index = {signature: n for n, signature in enumerate(dict.fromkeys(signatures))}  # each distinct one is written once
        table = {"edge": edge, "signatures": [s.to_json() for s in index], "microbatches": [index[s] for s in signatures]}
        self._control.send_text(self._schedule.placement[edge[1]], json.dumps(table))

    def recv(self, edge: tuple[int, int]) -> Sequence[Signature]:
        while edge not in self._early:  # a rank tells of its edges in the order in which its own stages come
            table = json.loads(self._control.recv_text(self._schedule.placement[edge[0]]))
            distinct = [Signature.from_json(s) for s in table["signatures"]]
            source, destination = table["edge"]
            self._early[source, destination] = tuple(distinct[n] for n in table["microbatches"])
        self._agreed[edge] = self._early.pop(edge)
        return self._agreed[edge]

    def conclude(self, lowered: LoweredStep) -> Agreed:
        """Agree on the forms of the losses and of shared parameters.

        Raises:
            AgreementError: ranks hold one parameter in different forms.
        """
        losses = {stage: [part.rank, Signature(_LEAF, (part.leaf,)).to_json()] for stage, part in lowered.losses.items()}
        shared = shared_forms(lowered.schedule, lowered.form.params, lowered.spec.tied)
        told = [json.loads(text) for text in self._control.all_gather(json.dumps([losses, shared]))]
        parts = {int(stage): LossPart(rank, _leaf(form)) for theirs, _ in told for stage, (rank, form) in theirs.items()}
        if not parts and "loss" in lowered.spec.wants:
            raise ValueError("no stage has returned a loss")
        require_same_forms([forms for _, forms in told])
        return Agreed(self._generation, self._agreed, dict(sorted(parts.items())), shared, _frozen(lowered))


def _leaf(text: str) -> LeafSignature:
    return Signature.from_json(text).leaves[0]


def _frozen(lowered: LoweredStep) -> frozenset[tuple[int, str]]:
    return frozenset((low.model, name) for low in lowered.stages.values() for name in frozen_below(low.function.fn))


class Replay:
    """Gives what was agreed before; raises where this process would now tell something else."""

    def __init__(self, agreed: Agreed) -> None:
        self._agreed = agreed
        self._now: dict[tuple[int, int], Sequence[Signature]] = {}

    def send(self, edge: tuple[int, int], signatures: Sequence[Signature]) -> None:
        self._now[edge] = tuple(signatures)

    def recv(self, edge: tuple[int, int]) -> Sequence[Signature]:
        return self._agreed.edges[edge]

    def conclude(self, lowered: LoweredStep) -> Agreed:
        """Compare what this process would tell with what was agreed on.

        Raises:
            Refrozen: its modules have frozen other parameters, on which depend gradients between processes, or what others update.
        """
        other = [edge for edge, signatures in self._now.items() if signatures != self._agreed.edges[edge]]
        changed = _frozen(lowered) ^ self._agreed.frozen
        if changed and (other or _matters_to_others(lowered, changed)):
            names = ", ".join(f"{name} of stage {model}" for model, name in sorted(changed)[:5])
            mend = "the ranks have to agree anew: call again; where stages are cut over a mesh, make a new mesh and trainer first"
            raise Refrozen(f"modules have frozen, or set free, {names}; {mend}")
        for edge in other:
            given, known = (" and ".join(map(str, dict.fromkeys(s))) for s in (self._now[edge], self._agreed.edges[edge]))
            raise ValueError(
                f"stage {edge[0]} now gives {given} to stage {edge[1]}, the ranks agreed on {known}; what a stage gives may change "
                f"only with the shapes of the batch: {_MEND}"
            )
        schedule, agreed, rank = lowered.schedule, self._agreed, lowered.ranks[0]
        now, before = ({s: p.leaf for s, p in found.items() if p.rank in lowered.ranks} for found in (lowered.losses, agreed.parts))
        if now != before:
            stage = min(s for s in now.keys() | before.keys() if now.get(s) != before.get(s))
            raise ValueError(
                f"stage {schedule.model_stages[stage]} now gives the losses {now.get(stage, 'none')} (one for each microbatch), "
                f"the ranks agreed on {before.get(stage, 'none')}; {_MEND}"
            )
        for name, form in shared_forms(schedule, lowered.form.params, lowered.spec.tied).items():
            if form != agreed.shared[name]:
                raise AgreementError(
                    f"{name} differ between the processes that hold them: rank {rank} now has {form}, all had {agreed.shared[name]}; "
                    f"{_MEND}, on every rank"
                )
        return agreed


def _matters_to_others(lowered: LoweredStep, changed: frozenset[tuple[int, str]]) -> bool:
    """Whether other processes update some of these parameters, too, and have to have the same of them frozen."""
    update, model = lowered.spec.update, lowered.schedule.model_stages
    if update is None or update.alike:
        return update is not None
    names = {stage: leaf_names(signature) for stage, signature in lowered.form.params.items()}
    shared = shared_leaves(lowered.schedule, lowered.form.params, lowered.spec.tied)
    leaves = [leaf for leaf in shared if any(lowered.schedule.placement[s] not in lowered.ranks for s, _ in leaf.holders)]
    return any((model[s], names[model[s]][n]) in changed for leaf in leaves for s, n in leaf.holders if n is not None)
