"""Stages: pure functions, their signatures, and the engines that differentiate them."""

from typing import TYPE_CHECKING

from ppfunc._lazy import attach

if TYPE_CHECKING:
    from . import collectives as collectives, engines as engines
    from .abstract import Outline as Outline, outline as outline
    from .engines import eager as eager, functional as functional, graph as graph
    from .errors import StageError as StageError
    from .layers import (
        params_of_layers as params_of_layers,
        params_of_stages as params_of_stages,
        stages_from_layers as stages_from_layers,
    )
    from .module import (
        ModuleStage as ModuleStage,
        split_sequential as split_sequential,
        stage_from_module as stage_from_module,
    )
    from .parallelize import shard as shard
    from .program import (
        Engine as Engine,
        FlatProgram as FlatProgram,
        Loss as Loss,
        Stage as Stage,
        StageProgram as StageProgram,
    )
    from .signature import LeafSignature as LeafSignature, Signature as Signature
else:
    __getattr__, __dir__, __all__ = attach(__name__)
