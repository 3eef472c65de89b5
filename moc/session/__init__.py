"""Fault tolerance of a run: snapshots beside training, resume, recovery and replay."""
