"""Agree with other ranks on a step, on signatures between stages, and on the values of shared parameters.

::

    agreement.py     Agreement.begin      the call and the shapes of the batch, in every step
                       Exchange           signatures of edges, forms of losses and of parameters: passed for
                                          new shapes, compared without messages for known ones
    comparison.py    require_same_...     what was compared, in words: steps, facts, modes, layouts, and what
                                          stages call, on ranks that hold the same
                     checksum             of a tensor, on its device
    ties.py          shared_leaves        the parameters that several stages hold
                     require_declared     refuses untied parameters that share memory
"""
