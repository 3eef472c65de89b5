"""Serves the state of a running job: metrics for Prometheus, a page, a terminal view, and a hook of events."""
