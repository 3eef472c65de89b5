"""Storage of saved state: files of named tensors in the coordinates of the unpartitioned model."""
