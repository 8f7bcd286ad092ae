"""Agree with other ranks on a step, on signatures between stages, and on the values of shared parameters.

::

    agreement.py     Agreement.begin      the call and the shapes of the batch, in every step
                       Negotiation        new shapes: signatures of edges, forms of losses and of parameters
                       Replay             known shapes: the same, compared without messages
    comparison.py    require_same_...     what was compared, in words: steps, facts, modes, layouts
    ties.py          shared_leaves        the parameters that several stages hold
      shared_sums.py   sum_over_places    their gradients, added up in the order of the stages at the end of a
                                          program, and their values, compared
        checksums.py     checksum         of a tensor, on its device
    shared_memory.py require_declared     refuse parameters that share memory and are not tied
"""
