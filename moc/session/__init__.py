"""Fault tolerance of a run: snapshots beside training, and the way back."""
