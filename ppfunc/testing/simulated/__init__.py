"""Simulate a transport: all ranks in one process, with faults, in an order and virtual time set by a seed."""

from .network import Fault, InjectedError, RankStopped
from .scheduler import RankResult
from .simulation import Simulated

__all__ = ["Fault", "InjectedError", "RankResult", "RankStopped", "Simulated"]
