"""The process of a worker: device, groups, random streams, start and end."""
