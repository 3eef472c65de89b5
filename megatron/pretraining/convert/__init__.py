"""Converts checkpoints between formats."""
