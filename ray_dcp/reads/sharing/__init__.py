"""What the ranks of a node read for each other, through memory that they share. Begin with ``node_reads``."""
