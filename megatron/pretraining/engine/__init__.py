"""The engine: computes, commits and replays iterations, on megatron-core."""
