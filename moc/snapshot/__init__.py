"""From device memory to host memory, beside the computation."""
