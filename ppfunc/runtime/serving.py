"""How stages are served to the interpreter: put in canonical form, and given to the engine once per signature."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import wraps
from typing import Any

import torch

from ppfunc.schedule import Schedule
from ppfunc.stage import Engine, Signature, StageProgram
from ppfunc.stage.module import mode_of
from ppfunc.stage.output import Output, Received, canonical, children

from .generators import alone
from .outside import suspended
from .plan import Served, sinks_of

Stage = Callable[..., Any]
Loss = Callable[[Any, Any], torch.Tensor]


def per_stage(stages: Sequence[Stage], schedule: Schedule) -> list[Stage]:
    """One function per stage; copies of a stage share theirs."""
    own = len(schedule.chains[0].stages)
    if len(stages) == schedule.stages:
        return list(stages)
    if len(stages) == own and schedule.replicas:
        originals = {s: n for n, group in enumerate(schedule.replicas) for s in group}
        shared = [stages[originals[s]] for s in range(schedule.stages)]
        return [_renumbered(fn, originals, schedule, s) for s, fn in enumerate(shared)] if schedule.skips else shared
    expected = f"{own} or {schedule.stages}" if schedule.replicas else str(schedule.stages)
    raise ValueError(f"got {len(stages)} stages, the schedule {schedule.name!r} has {expected}")


def _renumbered(fn: Stage, originals: dict[int, int], schedule: Schedule, stage: int) -> Stage:
    """The function of a copied stage, which calls the stages of its skip connections by the numbers of the originals."""
    own = {originals[s]: s for chain in schedule.chains if stage in chain.stages for s in chain.stages}

    @wraps(fn)
    def renumbered(params: Any, x: Any, *consts: Any) -> Any:
        if isinstance(x, Received):
            x = x._replace(skips={originals[s]: part for s, part in x.skips.items()})
        out = fn(params, x, *consts)
        if isinstance(out, Output) and out.skips:
            out = out._replace(skips={own.get(s, s): part for s, part in out.skips.items()})
        return out

    return renumbered


def autocast() -> Hashable:
    """Which autocast is on."""
    return tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))


class Server:
    """Serves stages by an engine; keeps the program of every signature that it has met."""

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: Schedule,
        engine: Engine,
        loss_fn: Loss | None,
        loss_shape: tuple[int, ...],
        *,
        has_aux: bool,
        return_outputs: bool,
    ) -> None:
        self.engine, self.loss_shape, self.has_aux = engine, loss_shape, has_aux
        self.programs: dict[tuple[Any, ...], StageProgram] = {}
        lasts = {c.stages[-1] for c in schedule.chains}
        self.functions = []
        for stage, fn in enumerate(per_stage(stages, schedule)):
            last, skips = stage in lasts, sinks_of(schedule, stage)[int(stage not in lasts) :]
            call = canonical(
                fn,
                last=last,
                loss_fn=loss_fn,
                return_outputs=return_outputs,
                skips=skips,
                targeted=last and loss_fn is not None,
            )
            self.functions.append(call)
        self.modes = [mode for mode in map(mode_of, stages) if mode is not None]
        self.losing = lasts if loss_fn else set()
        self.lasts = lasts

    def mode(self) -> Hashable:
        """What the stages depend on beside their arguments: whether modules train, and autocast."""
        return (autocast(), *(mode() for mode in self.modes))

    def __call__(
        self,
        stage: int,
        params: Hashable,
        example: Callable[[], Any],
        x: Signature,
        constants: tuple[Signature, ...],
        device: torch.device,
    ) -> Served:
        """The stage for these signatures.

        Args:
            stage: its number.
            params: what a program depends on of the parameters: their signature and strides.
            example: gives the parameters, for an example.
            x, constants: signatures of the input and of what follows it.
            device: where the stage computes.

        Raises:
            StageError: the engine cannot serve it.
            ValueError: it returns what it must not.
        """
        key = (stage, params, x, constants, device, self.mode())
        if key not in self.programs:
            with suspended(), alone:
                program = self.engine(
                    self.functions[stage], (example(), x, *constants), has_aux=True, name=f"stage {stage}", device=device
                )
            if not isinstance(program, StageProgram):
                raise TypeError(f"engine: it returned an object of type {type(program).__name__} for stage {stage}, expected a StageProgram")
            self.programs[key] = program
        program = self.programs[key]
        carry, skips, loss = children(program.y)
        outputs, metrics, state = children(program.aux)
        sinks = (*(() if stage in self.lasts else (carry,)), *children(skips))
        self._require(stage, loss, metrics, state, constants)
        return Served(program.flat, sinks, loss if loss.leaves else None, outputs, metrics, state, program.random)

    def _require(
        self, stage: int, loss: Signature, metrics: Signature, state: Signature, constants: tuple[Signature, ...]
    ) -> None:
        """Raise where a stage returns what the caller has not asked for or cannot get."""
        if stage in self.losing or loss.leaves:
            got = [str(leaf) for leaf in loss.leaves]
            if len(got) != 1 or loss.leaves[0].shape != self.loss_shape or not loss.leaves[0].dtype.is_floating_point:
                if self.loss_shape:
                    form, mend = f"floating tensor of shape {list(self.loss_shape)}, the loss_shape", "return one of that shape, or pass another loss_shape"
                else:
                    form, mend = "floating scalar", "take its mean or sum"
                raise ValueError(f"the loss of stage {stage} must be a {form}, got {', '.join(got) or 'nothing'}; {mend}")
        if (metrics.leaves or state.leaves) and not self.has_aux:
            raise ValueError(f"stage {stage} returns {'metrics' if metrics.leaves else 'a state'}; pass has_aux=True to get them")
        given = constants[-1] if constants and state.leaves else None
        if state.leaves and (given is None or given.without_grad() != state.without_grad()):
            raise ValueError(f"stage {stage} returns the state {state}, it was given {given or 'none'}; pass state={{{stage}: …}} of that form")
