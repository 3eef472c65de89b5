"""Snapshots from device memory to host memory, beside the computation."""
