"""One worker's process: its device, groups and random streams, its start and its end."""
