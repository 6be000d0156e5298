"""Reading a checkpoint's files: DCP's ``StorageReader`` on a store. Begin with ``reader``; ``engine`` moves the bytes.

``checkpoint`` is what all ranks are told of the files, ``wanted`` which reads a plan needs, ``sharing`` what the ranks
of a node read for each other. (Not ``read``: that is a function of the public API.)
"""
