"""Logs tensors of iterations by key, which a replay needs in addition to snapshots, such as upstream logs."""
