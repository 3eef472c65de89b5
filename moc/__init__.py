"""Fault tolerance for Mixture-of-Experts training; imports nothing of megatron.pretraining."""
