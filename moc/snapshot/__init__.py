"""Snapshots from device memory to host memory, copied in the background."""
