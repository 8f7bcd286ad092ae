"""Keep ranks together: a step or a save happens on all of them, or fails on all with the first failure.

A step flows through these modules::

    rendezvous     pair up the n-th calls of all ranks in the store of their group
        |
    socket_links   connect to the tree and to peers, over TCP   (simulated: ``ppfunc.testing``)
        |            connections   accept and open; read a watched connection of each neighbour in a thread
        |            sockets       frame messages without blocking; both ends prove the key by HMAC
        |
    control        begin: pass the call and the shapes down the tree, and compare them
        |          end: gather losses up the tree (loss_texts), vote, commit at rank 0, pass the sum down
        |            tree          the messages of a binary tree of ranks, and the protocol of links
        |
        +--fail--> failure_tree  take the first failure of a generation; pure
                   suspects      find the rank, or the link, that holds up a late one; pure

The messages of steps are read by the thread that waits for them: to wake it takes longer than to send one.
No thread refers to a transport, only to its links: a transport that is dropped ends them.
"""
