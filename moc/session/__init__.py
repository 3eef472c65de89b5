"""Provides the fault tolerance of a run: background snapshots, resume, recovery and replay."""
