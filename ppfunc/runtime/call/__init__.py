"""Call a step: read the arguments, run, and make results.

::

    step.py          StepFunction       one call, which fails on all ranks or on none
      arguments.py     read_arguments   what the caller gave -> leaves, without history
        forms.py         StepForm       all that a program depends on beside the values
                         cut            a batch -> microbatches, as views
        batch.py         Microbatches   as the caller made them; refuses what cannot be cut
      results.py       collect          buffers -> a StepResult
                         Owned          copies results that share memory
"""
