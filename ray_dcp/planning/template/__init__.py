"""Templates: what a load fills, how that compares with what is stored. Begin with ``template_planner``."""
