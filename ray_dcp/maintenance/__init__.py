"""Work on stored checkpoints without ranks, Ray or torch: verify, sweep, copy."""
