"""Lets megatron.core be imported on this machine, before any test does."""

from megatron.pretraining.process import cpu

cpu.install()
