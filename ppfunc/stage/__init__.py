"""Stages: pure functions, their signatures, and the engines that differentiate them."""

from .abstract import Outline, abstract, outline
from .cache import cached
from .eager_engine import eager
from .errors import StageError
from .functional_engine import functional
from .graph_engine import graph
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
    "cached",
    "eager",
    "functional",
    "graph",
    "outline",
    "split_sequential",
    "stage_from_module",
]
