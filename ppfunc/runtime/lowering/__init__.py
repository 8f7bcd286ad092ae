"""Lower a step to the meaning of every instruction for given shapes; ranks agree on it.

::

    lower.py           lower          stages, schedule, form -> LoweredStep, values only; refuses what a
                                      step would not honour
      stage_programs.py  StagePrograms  evaluations of stages for `lower`, and their programs
    agreement.py       Agreement      the call and the shapes of the batch, in every step; signatures of
                                      edges, forms of losses and of parameters, where they are new
      comparison.py      require_same   what ranks compare, in words: steps, facts, modes, layouts
      ties.py            shared_leaves  the parameters that several stages hold
"""
