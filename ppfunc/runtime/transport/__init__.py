"""Carry messages between ranks in processes of their own, as `ppfunc.runtime.ports` asks for them::

p2p.py            P2P            one process per rank: its control half is ``control/control.py``
                  PairGroups     messages from one rank to another, a communicator per route
                  open_groups    opens the communicators of routes and axes, in one order on all ranks
  mapped.py         open_mapped    a route between processes of one host, through memory
"""
