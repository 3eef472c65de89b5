"""Elastic training (Lazarus): replicas of experts, and results that do not depend on the number of workers."""
