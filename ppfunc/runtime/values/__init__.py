"""Hold what every room of a step hands on, as values; nothing here runs, sends or traces.

::

    batch.py         Microbatches     the batch as the caller made it; refuses what cannot be cut
    forms.py         StepForm         all that a program depends on beside the values
                     cut              a batch -> microbatches, as views
    arguments.py     read_arguments   what the caller gave -> leaves, without history
    buffers.py       Buffers          what the calls of one step read and write
    grid.py          Axes             the pipelines around a rank, by the axes of a mesh
    errors.py        PipelineError    errors of a step, and the form in which ranks send them
"""
