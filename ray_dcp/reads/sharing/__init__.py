"""What the ranks of a node read for each other, through memory that they share.

Begin with ``door``: all that ``reader`` knows of it, and the line there that makes a ``NodeReads`` turns all of it on.
``node_reads`` is one rank's part, ``segment`` the memory. Who shares what is decided by ``planning/node_sharing``.
"""
