"""Compile a lowered step to one flat list of calls, and run it with buffers made for this step alone::

compile.py     compile_step   LoweredStep -> CompiledStep, with the calls of
calls.py         stage programs, of residuals on their way, and of the end of a program
execute.py     fill           arguments -> Buffers, with sums of gradients
               execute        every call in turn; where a number was first not finite
               collect        buffers -> StepResult
record.py      Recorder       the times of the calls
               in_ranges      calls in ranges of torch's profiler
"""
