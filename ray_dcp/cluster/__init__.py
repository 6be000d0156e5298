"""Ray's side: the coordinator's actor, a rank's way to it, and which group a call means. Begin with ``group``."""

from ray_dcp.gc_pause import collector_paused

# Importing torch makes a quarter of a million objects that all stay: where a rank or coordinator has not done so yet, a
# fifth of its CPU time (0.28 of 1.35 s) would go into walking them again and again meanwhile.
with collector_paused():
    import torch.distributed.checkpoint  # noqa: F401
