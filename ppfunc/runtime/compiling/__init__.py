"""Compile a lowered step to one flat list of calls, and keep it for its form.

::

    compiled_steps.py  CompiledSteps  the compiled steps of a step function, by the form of its arguments
      compile.py         compile_step   LoweredStep -> CompiledStep, with the calls of
        calls.py           stage programs; residual_calls.py takes residuals out of their way
        tail_calls.py      the end of a program: sums of shared gradients, the update of parameters
"""
