"""The model: construction, shape and precision."""
