"""Evaluate stages without values, and refuse what no program can repeat.

One evaluation gives the outline of a stage::

    control_flow    cond, scan and flex attention are called as the Python that they equal
    foreign_draws   Python's and numpy's generators are watched
      outline       the stage is called on tensors without values: its outputs, its draws, its modules
        purity      every operator is seen: writes into what the call has not made, draws, and
          communication    collectives through which a gradient would flow wrongly
        undeclared  frozen parameters of which the step asks for gradients
    weight_gradients       autograd.Functions whose backward leaves a weight's gradient to the user

The engines use `purity` and `communication` also where a stage runs or is traced.
"""
