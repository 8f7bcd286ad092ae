"""Keep ranks together: a step or a save happens on all of them, or fails on all with the first failure.

A step flows through these modules::

    links          pair up the n-th calls of all ranks in the store of their group; connect to the tree, and
        |          to peers on demand, over TCP (simulated: ``tests/network``)
        |            connections   accept and open, by HMAC with a key; frame messages
        |
    control        begin: pass the call and the shapes down the tree, and compare them
        |          end: collect losses up the tree, vote, commit at rank 0, pass the sum down
        |
        +--fail--> take the first failure of a generation; find the rank, or the link, that holds up others

    tree           the messages of a binary tree of ranks, and the failure that counts; pure

The thread that waits for a message of a step reads it: to wake one takes longer than to send a message. One
thread accepts, and one watches each neighbour in the tree. No thread refers to a transport, only to its
links: a transport that is dropped ends them.
"""
