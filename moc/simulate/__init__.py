"""Simulates the costs of checkpoints, failures and recovery by policy, for clusters that are not available."""
