"""Turns text into samples, and a position into its batches."""
