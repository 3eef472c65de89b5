"""Pre-training of Mixture-of-Experts language models on megatron.core."""
