"""The simulated transport: all ranks in one process, with faults, in an order and a virtual time that a seed decides."""

from .faults import Fault, InjectedError, RankStopped
from .scheduler import Outcome
from .simulation import Simulated

__all__ = ["Fault", "InjectedError", "Outcome", "RankStopped", "Simulated"]
