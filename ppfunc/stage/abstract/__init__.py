"""Evaluate stages without values, and refuse effects that no program can repeat.

One evaluation gives the outline of a stage::

    outline         the stage is called: its outputs, its draws, its modules
      evaluation    on tensors without values; cond, scan and flex attention as the Python that they equal
      purity        every operator is seen: writes into what the call has not made, draws, and collectives
                    through which a gradient would flow wrongly
                    every operator is noted, for ranks that hold the same stage to compare
      captures      what the stage reads beside its arguments, for which its outline holds
      output        what it returns beside ``y``, and a loss function as a part of the last stage

It ends with the stage as a function of its differentiable leaves, for every engine.
The engines use `evaluation` and `purity` also where a stage runs or is traced.
"""
