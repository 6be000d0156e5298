"""Ray's side: the coordinator's actor, a rank's way to it, and which group a call means. Begin with ``group``."""
