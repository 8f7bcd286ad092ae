"""Trace functions as graphs of operators, change the graphs, and write them as programs::

    joint.py          trace            records forward and backward of a stage as one graph
      graph.py          GraphRecorder    records operators; what is asked of their nodes
                      clean            drops copies, duplicates and dead operators
                      require_same     compares a trace of symbols with the one of numbers
    cut.py            cut              cuts the graph in forward, backward and the two parts of a backward;
                                       posts collectives early, waits late
                      cut_for          chooses what the backward computes again
                      additions        finds how long memory is used, and where gradients are added up
    emit.py           TracedFunction   writes a program in Python; runs the one in C++ if it is there
                      compiled         has inductor compile a program
                      interleave       runs two programs as one
      native.py         native           writes a program as a table, which ``native.cpp`` runs

`graph` and `emit` also serve `ppfunc.splitter`, which records above autograd.
"""
