"""A service in the place of W&B, whose calls never return."""

import threading


class Artifact:
    """A record of a checkpoint."""

    def __init__(self, *words, **options):
        threading.Event().wait()


def init(**options):
    """Accepts the run."""


def log(values, step=None, commit=None):
    """Hangs, as a connection without an answer does."""
    threading.Event().wait()


finish = log
