"""Training data: from text to samples, and from a position to its batches."""
