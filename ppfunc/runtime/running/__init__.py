"""Run a compiled step, with buffers made for this step alone::

    execute.py     run_step    a compiled step, run to its end on all ranks: every step of a call in turn
                   fill        arguments -> Buffers, with sums of gradients
                   execute     every call in turn

`record.py` measures the calls; `nonfinite.py` runs a step again, to find where a number was first not finite.
"""
