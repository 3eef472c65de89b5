"""Recovers the state of a run from surviving workers and snapshots."""
