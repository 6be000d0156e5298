"""The coordinator's half: ``coordinator`` is the door, ``calls`` and ``open_call`` keep order, sessions do the work."""
