"""Computes, commits and replays iterations on megatron-core."""
