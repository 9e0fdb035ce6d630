"""What a run needs around the algorithm: checks, checkpoints, metrics, evaluation, strategies."""
