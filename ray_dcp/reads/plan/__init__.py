"""Which bytes a load reads, as values and arithmetic: no torch, and nothing is read here.

Begin with ``record_read``. ``shape`` says how a store is best read, ``rows`` where a box lies in a payload,
``whole_load`` what all ranks of a load would read (``ray-dcp show --plan``). The reads themselves are in ``reads``.
"""
