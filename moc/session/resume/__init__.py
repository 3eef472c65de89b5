"""Resume of a run: what survives, and how the state is rebuilt from it."""
