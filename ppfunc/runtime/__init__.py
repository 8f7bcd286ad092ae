"""The runtime: the interpreter, the transports and everything else that has an effect."""

from .batch import microbatch
from .errors import AgreementError, PipelineError
from .inprocess import InProcess
from .overlap import interleaved, two_streams
from .p2p import P2P
from .results import Aux
from .session import Session
from .transport import Transport

__all__ = [
    "AgreementError",
    "Aux",
    "InProcess",
    "P2P",
    "PipelineError",
    "Session",
    "Transport",
    "interleaved",
    "microbatch",
    "two_streams",
]
