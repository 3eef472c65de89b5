"""Simulates the policies: what checkpoints, failures and recovery cost on a cluster that is not available."""
