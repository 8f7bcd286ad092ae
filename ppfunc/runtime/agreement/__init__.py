"""Agree with other ranks on a step, on signatures between stages, and on the values of shared parameters.

::

    agreement.py     Agreement.begin      the call and the shapes of the batch, in every step
                       Exchange           signatures of edges, forms of losses and of parameters: passed for
                                          new shapes, compared without messages for known ones
    batch_shapes.py  BatchShapes          the shapes of a batch, as a text for ranks that have none
    comparison.py    require_same_...     what was compared, in words: steps, facts, modes, layouts
                     checksum             of a tensor, on its device
    programs.py      require_same_programs: what stages call, on ranks that hold the same
    ties.py          shared_leaves        the parameters that several stages hold
                     require_declared     refuses untied parameters that share memory
"""
