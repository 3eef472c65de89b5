"""Lets megatron.core be imported on this machine, before any test does."""

from megatron.training import cpu

cpu.install()
