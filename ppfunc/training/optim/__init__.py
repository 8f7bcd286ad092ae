"""Optimizers as pairs of pure functions, ``init(params)`` and ``update(grads, state, params)``.

Its files::

    optimizer.py     Optimizer; chain: clip first; from_updates; ema: an average; by_name: by group
    updates.py       adamw, sgd: by fused kernels, or by formulas where somebody looks through
                     muon: on whole matrices
    rates.py         learning rates by the number of updates
    norms.py         norms of gradients, of which each rank has a part; clipping
"""

from typing import TYPE_CHECKING

from ppfunc._lazy import attach

if TYPE_CHECKING:
    from .norms import clip_by_global_norm as clip_by_global_norm, global_norm as global_norm
    from .optimizer import (
        Optimizer as Optimizer,
        by_name as by_name,
        chain as chain,
        ema as ema,
        from_updates as from_updates,
    )
    from .rates import linear as linear, warmup_cosine as warmup_cosine
    from .updates import adamw as adamw, muon as muon, sgd as sgd
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "norms": "clip_by_global_norm global_norm",
            "optimizer": "Optimizer by_name chain ema from_updates",
            "rates": "linear warmup_cosine",
            "updates": "adamw muon sgd",
        },
    )
