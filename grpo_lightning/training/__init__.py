"""A run around the algorithm: checks, checkpoints, metrics, evaluation, strategies."""
