"""The policies on a model clock: what checkpoints, failures and recovery cost on a cluster that is not at hand."""
