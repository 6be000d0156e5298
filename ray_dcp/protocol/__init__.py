"""One save and one load between ranks and their coordinator: plain objects that tests drive in one process.

``rank`` is what runs in a rank's process, ``coordinator`` what runs once for all; ``messages`` is what travels between
them, ``exception`` what everybody sees when one fails.
"""
