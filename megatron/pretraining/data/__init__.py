"""Text made samples, and where in them a run is."""
