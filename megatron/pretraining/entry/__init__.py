"""The entry point for scripts of Megatron-LM: runs their configuration, model, data and forward step in our loop."""
