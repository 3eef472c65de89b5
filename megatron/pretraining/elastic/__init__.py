"""Elastic training (Lazarus): replicas of experts, and batches that do not depend on the number of workers."""
