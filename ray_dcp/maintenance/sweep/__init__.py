"""What no committed checkpoint needs, and its removal: decided first, deleted after. Begin with ``removal``."""
