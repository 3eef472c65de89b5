"""What can be wrong with a checkpoint."""


class CheckpointError(RuntimeError):
    """A checkpoint is missing, incomplete, damaged, or does not fit; the message names what, and the remedy."""
