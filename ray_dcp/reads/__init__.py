"""Reading a checkpoint's files: DCP's ``StorageReader`` on a store. Begin with ``reader``; ``engine`` moves the bytes.

``checkpoint`` has what all ranks are told of the files, ``wanted`` finds the records that a plan needs, and ``plan``
(without torch) the bytes of them. ``fill`` puts these into tensors; in ``sharing`` the ranks of a node read for each
other.
Stores are in ``store``, the bytes of a record in ``format``. (Not ``read``: that is a function of the public API.)
"""
