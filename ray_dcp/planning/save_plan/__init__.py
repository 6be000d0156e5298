"""A save's plan on a rank and for all: by tables, checked, replicas compared. Begin with ``state_planner``."""
