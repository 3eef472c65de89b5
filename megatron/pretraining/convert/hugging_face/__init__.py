"""Checkpoints as transformers reads and writes them: a directory of safetensors files, an index and a configuration."""
