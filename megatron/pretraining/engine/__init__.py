"""The engine: how one iteration is computed, committed and computed again, on megatron-core."""
