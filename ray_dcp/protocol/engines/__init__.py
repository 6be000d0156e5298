"""Who does the work of a save or load, in both halves of it: ``own_save`` and ``own_load``, ``plugin_save`` and
``plugin_load``. ``protocol.steps`` says what they are asked, and chooses; start there.

Not here: what is done whoever does the work, which is in ``protocol.rank`` and ``protocol.coordinator``.
"""
