"""The simulated transport: all ranks in one process, with faults, in an order and a virtual time that a seed
decides.
"""

from .faults import Fault, InjectedError, RankStopped
from .scheduler import RankResult
from .simulation import Simulated

__all__ = ["Fault", "InjectedError", "RankResult", "RankStopped", "Simulated"]
