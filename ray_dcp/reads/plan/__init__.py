"""The bytes that a load reads, as values and arithmetic: without torch, and without reading anything.

Begin with ``record_read``. ``shape`` says how a store is best read, ``rows`` where a box lies in a payload, and
``whole_load`` what all ranks of a load would read (``ray-dcp show --plan``). The reads themselves are in ``reads``.
"""
