"""Dense checkpoints (``--save``, ``--load``), which stock Megatron-LM reads."""
