"""Logs that a replay needs beside snapshots: tensors of iterations, by key; one kind has crossed pipeline stages."""
