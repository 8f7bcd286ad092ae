"""Show the text, bytes and operations of a step before it runs, from shapes alone::

analysis.py    LoweredFunction, CompiledFunction   what `step.lower` gives to people
               memory_of   the calls of a rank, run without values
               OnPaper     ranks of a mesh whose processes do not exist: lowered, never run
  ledger.py      Ledger      notes what lives
  memories.py    Memories    the bytes of every rank, as a table and as a picture
"""
