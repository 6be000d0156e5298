"""Templates: what a load fills, and how that compares with what is stored. Begin with ``template_planner``."""
