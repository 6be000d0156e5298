"""A save's plan, on each rank and for all: in tables, checked, replicas compared. Begin with ``state_planner``."""
