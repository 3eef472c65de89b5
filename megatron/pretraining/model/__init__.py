"""The model, and its shape and precision."""
