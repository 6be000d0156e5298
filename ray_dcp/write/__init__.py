"""Writing a checkpoint's files: DCP's ``StorageWriter`` on a store. Begin with ``writer``.

What is in a file is ``format``'s; which rank writes what is decided in ``planning``.
"""
