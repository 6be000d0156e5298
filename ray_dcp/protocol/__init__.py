"""One save and one load, without Ray: a rank's half, the coordinator's half, and what travels between them.

Start with ``rank.save`` and ``messages``. ``steps`` is the seam to whoever plans, writes and reads (``engines``),
``call`` what a rank holds while it takes part, ``solo`` a process alone, as a group of one. Not here: actors, which are
in ``cluster``.
"""
