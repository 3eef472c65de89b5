"""Where saved state lives: files of named tensors in unpartitioned coordinates."""
