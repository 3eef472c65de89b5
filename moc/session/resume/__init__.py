"""Where a run begins: what is left, and how the state is made of it."""
