"""What is committed under a root, and what to say of a place where nothing is. Reads no payloads.

Start at ``committed``: what a committed checkpoint is. ``facts`` is what is told of one, ``newest`` which one a run
goes on from, ``listing`` all under a root, ``pointer`` where one really lies, ``explain`` why there is none. What a
rank reads of one is in ``reads``, what is removed in ``maintenance/sweep``.
"""
