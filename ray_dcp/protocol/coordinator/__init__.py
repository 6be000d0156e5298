"""The coordinator's half: start with ``coordinator``, which ``cluster.coordinator_actor`` is a shell around.

``calls`` finds out which rank's call is which, ``open_call`` waits for the parts of one, and a session turns them into
answers (``save_session``, ``load_session``, ``small_sessions``). Not here: a rank's half, of which nothing is imported.
"""
