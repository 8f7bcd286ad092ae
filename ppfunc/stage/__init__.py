"""Stages: pure functions, their signatures, and the engines that differentiate them."""

from .abstract import Outline, abstract, outline
from .dynamic_engines import eager, functional
from .errors import StageError
from .graph_engine import graph
from .layers import params_of_layers, params_of_stages, stages_from_layers
from .module import ModuleStage, split_sequential, stage_from_module
from .program import Engine, FlatProgram, Loss, Stage, StageProgram
from .signature import LeafSignature, Signature

__all__ = [
    "Engine",
    "FlatProgram",
    "LeafSignature",
    "Loss",
    "ModuleStage",
    "Outline",
    "Signature",
    "Stage",
    "StageError",
    "StageProgram",
    "abstract",
    "eager",
    "functional",
    "graph",
    "outline",
    "params_of_layers",
    "params_of_stages",
    "split_sequential",
    "stage_from_module",
    "stages_from_layers",
]
