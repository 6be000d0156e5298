"""The reads that the ranks of a node do for each other, through memory that they share.

Begin with ``door``: it is all that ``reader`` knows of this, and the line there that makes a ``NodeReads`` turns it on.
``node_reads`` is one rank's part, ``segment`` the memory. Who shares what is decided by ``planning/node_sharing``.
"""
