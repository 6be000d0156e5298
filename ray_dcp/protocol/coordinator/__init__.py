"""The coordinator's half: start with ``coordinator``, which ``cluster.coordinator_actor`` is a shell around.

``calls`` finds out which rank's call is which, ``open_call`` waits for the parts of one, and a session turns them into
answers (``save_session``, ``load_session``, ``small_sessions``). Not here: a rank's half, of which nothing is imported.
"""

from ray_dcp.gc_pause import collector_paused

# Importing torch makes a quarter of a million objects that all stay: where a rank or coordinator has not done so yet, a
# fifth of its CPU time (0.28 of 1.35 s) would go into walking them again and again meanwhile.
with collector_paused():
    import torch.distributed.checkpoint  # noqa: F401
