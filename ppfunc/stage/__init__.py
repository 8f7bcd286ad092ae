"""Stages: pure functions, their signatures, and the engines that differentiate them.

A stage on its way to a program::

    modules.py    what users have: modules and layers become functions ``fn(params, x) -> y``
    abstract/     output: the form that engines take, with the loss and all results
                  outline: the signature of its outputs, by evaluating it without values; and refusals of
                  what no program can repeat: writes, foreign draws, wrong collectives
    engines/      graph, functional, eager differentiate it
    program.py    what engines take, and return: StageProgram, forward, backward, and a backward in two parts

Trees of tensors are read by `tree`, described by `signature`, `layout` (DTensors) and `constants` (numbers
and block masks among tensors). `errors` finds the user's lines, `device` has all that a device does beside
computing, `operators` what operators do, `_torch` the private names of torch, `process` what all threads
share.
`transforms` makes stages of stages; `collectives` and `attention` may be called in a stage.
"""

from typing import TYPE_CHECKING

from ppfunc._lazy import attach

if TYPE_CHECKING:
    from . import collectives as collectives, engines as engines
    from .abstract.outline import outline as outline
    from .engines import eager as eager, functional as functional, graph as graph
    from .errors import StageError as StageError
    from .modules import (
        ModuleStage as ModuleStage,
        shard as shard,
        stage_from_module as stage_from_module,
        stages_from_layers as stages_from_layers,
    )
    from .program import (
        Engine as Engine,
        FlatProgram as FlatProgram,
        Loss as Loss,
        Outline as Outline,
        Stage as Stage,
        StageProgram as StageProgram,
    )
    from .signature import LeafSignature as LeafSignature, Signature as Signature
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "": "collectives engines",
            "abstract.outline": "outline",
            "engines": "eager functional graph",
            "errors": "StageError",
            "modules": "ModuleStage shard stage_from_module stages_from_layers",
            "program": "Engine FlatProgram Loss Outline Stage StageProgram",
            "signature": "LeafSignature Signature",
        },
    )
