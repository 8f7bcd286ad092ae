"""Optimizers as pairs of pure functions, ``init(params)`` and ``update(grads, state, params)``::

composed.py             chain: clip, then an optimizer; from_updates
optimizers.py           adamw, sgd: torch's fused kernels on lists of leaves
  leaves.py               trees taken apart for the kernels
  rates.py                learning rates by the number of updates
norms.py                norms of gradients, of which each rank has a part; clipping
"""

from .composed import chain as chain, from_updates as from_updates
from .norms import clip_by_global_norm as clip_by_global_norm, global_norm as global_norm
from .optimizers import adamw as adamw, sgd as sgd
from .protocols import Optimizer as Optimizer
from .rates import constant as constant, linear as linear, warmup_cosine as warmup_cosine
