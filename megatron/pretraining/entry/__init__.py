"""The entry point for scripts of Megatron-LM: their configuration, model, data and forward step, with our loop."""
