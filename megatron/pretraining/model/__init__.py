"""Constructs the model, and defines its shape and precision."""
