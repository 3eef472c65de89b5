"""Pipeline that saves snapshots in the background."""
