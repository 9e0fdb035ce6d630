"""The parts of a training run around the loss: checks, checkpoints, metrics, evaluation, strategies."""
