"""Test schedules and steps: Hypothesis strategies of schedules, and a seeded, faulty transport."""

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from .network import Fault as Fault, InjectedError as InjectedError, RankStopped as RankStopped
    from .simulated import Simulated as Simulated
    from .strategies import schedules as schedules
else:
    __getattr__, __dir__, __all__ = attach(__name__)
