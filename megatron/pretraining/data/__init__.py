"""Samples, and where in them a run is."""
