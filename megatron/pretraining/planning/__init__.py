"""Predicts what checkpoints and failures cost a model, without a GPU."""
