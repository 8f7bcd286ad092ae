"""Optimizers as pairs of pure functions, ``init(params)`` and ``update(grads, state, params)``::

composed.py             chain: clip, then an optimizer; from_updates; ema: an average over updates
groups.py               by_name: an optimizer for each group of parameters
optimizers.py           adamw, sgd: element by element
whole.py                muon: on whole matrices
  updates.py              runs fused kernels, or formulas where somebody looks through
  leaves.py               trees taken apart for the kernels
  rates.py                learning rates by the number of updates
norms.py                norms of gradients, of which each rank has a part; clipping
"""

from typing import TYPE_CHECKING

from ppfunc._lazy import attach

if TYPE_CHECKING:
    from .composed import chain as chain, ema as ema, from_updates as from_updates
    from .groups import by_name as by_name
    from .norms import clip_by_global_norm as clip_by_global_norm, global_norm as global_norm
    from .optimizers import adamw as adamw, sgd as sgd
    from .protocols import Optimizer as Optimizer
    from .rates import linear as linear, warmup_cosine as warmup_cosine
    from .whole import muon as muon
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "composed": "chain ema from_updates",
            "groups": "by_name",
            "norms": "clip_by_global_norm global_norm",
            "optimizers": "adamw sgd",
            "protocols": "Optimizer",
            "rates": "linear warmup_cosine",
            "whole": "muon",
        },
    )
