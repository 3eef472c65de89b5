"""Predicts the cost of checkpoints and failures for a model, without a GPU."""
