"""Fault tolerance for Mixture-of-Experts training; imports nothing of megatron.pretraining."""

__version__ = "0.1.0"
