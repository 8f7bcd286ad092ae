"""Optimizers as pairs of pure functions, ``init(params)`` and ``update(grads, state, params)``::

composed.py             chain: clip, then an optimizer; from_updates; ema, lookahead: averages over updates
groups.py               by_name: an optimizer for each group of parameters
optimizers.py           adamw, sgd: element by element
whole.py                muon, lamb, adafactor: on whole leaves
  updates.py              runs fused kernels, or formulas where somebody looks through
  leaves.py               trees taken apart for the kernels
  rates.py                learning rates by the number of updates, or by a metric
norms.py                norms of gradients, of which each rank has a part; clipping
"""

from typing import TYPE_CHECKING

from ppfunc._lazy import attach

if TYPE_CHECKING:
    from .composed import (
        chain as chain,
        ema as ema,
        from_updates as from_updates,
        lookahead as lookahead,
    )
    from .groups import by_name as by_name
    from .norms import clip_by_global_norm as clip_by_global_norm, global_norm as global_norm
    from .optimizers import adamw as adamw, sgd as sgd
    from .protocols import Optimizer as Optimizer
    from .rates import linear as linear, plateau as plateau, warmup_cosine as warmup_cosine
    from .whole import adafactor as adafactor, lamb as lamb, muon as muon
else:
    __getattr__, __dir__, __all__ = attach(__name__)
