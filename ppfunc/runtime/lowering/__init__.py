"""Lower a step to what every instruction means for given shapes, and compile it to one flat list of calls::

compiled_steps.py  CompiledSteps  the compiled steps of a step function, by the form of its arguments:
  lower.py           lower          stages, schedule, form -> LoweredStep (lowered.py), values only;
                                    refuses what a step would not honour
  compile.py         compile_step   LoweredStep -> CompiledStep, with the calls of
    calls.py           stage programs; residual_calls.py takes residuals out of their way,
                       overlap.py runs two of them as one
    tail_calls.py      the end of a program: sums of shared gradients, the update of parameters
  stage_programs.py  StagePrograms  evaluations of stages for `lower`, their programs for `compile_step`
analysis.py        LoweredFunction, CompiledFunction   what `step.lower` gives to people
  memory.py          memory_of      the calls of a rank, run without values; ledger.py notes what lives
"""
