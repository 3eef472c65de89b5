"""Checkpoints of one format made those of another one."""
