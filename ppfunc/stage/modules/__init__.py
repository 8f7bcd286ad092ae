"""Make stages of ``torch.nn`` modules and of layers, and detect later changes of the modules.

From what a user has to functions ``fn(params, x) -> y``::

    parallelize     torch's plans laid over a mesh, then
    module          a module as a pure function of its parameters and its state; a call leaves it unmodified,
                    later changes of submodules and hooks are seen
    layers          a list of functions of one layer each, and a partition of it
"""
