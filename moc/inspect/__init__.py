"""Inspects and verifies checkpoints, without torch and without unpickling anything."""
