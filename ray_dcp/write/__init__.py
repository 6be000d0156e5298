"""Writing a checkpoint's files: DCP's ``StorageWriter`` on a store. Begin with ``writer``.

``format`` says what is in a file; ``planning`` decides which rank writes what.
"""
