"""Reading a checkpoint's files: DCP's ``StorageReader`` on a store. Begin with ``reader``; ``engine`` moves the bytes.

``checkpoint`` is what all ranks are told of the files, ``wanted`` which records a plan needs, ``plan`` (without torch)
which bytes of them, ``fill`` how these get into tensors, ``sharing`` what the ranks of a node read for each other.
Stores are in ``store``, the bytes of a record in ``format``. (Not ``read``: that is a function of the public API.)
"""
