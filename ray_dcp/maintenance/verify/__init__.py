"""Whether a checkpoint still is what was written: every byte of every file. Begin with ``verification``."""
