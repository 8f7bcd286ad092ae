"""Show the text, bytes and operations of a step before it runs, from shapes alone::

analysis.py    LoweredFunction, CompiledFunction   what `step.lower` gives to people
  memory.py      memory_of   the calls of a rank, run without values
  ledger.py      Ledger      notes what lives
"""
