"""Define the values that the rooms of a step hand on; nothing here runs, sends or traces.

::

    arguments.py     Microbatches     the batch as the caller made it; refuses a batch that cannot be cut
                     read_arguments   arguments of the caller -> leaves, without history
                     StepForm         all that a program depends on beside the values
    buffers.py       Buffers          memory that the calls of one step read and write
    errors.py        PipelineError    errors of a step, and the form in which ranks send them
"""
