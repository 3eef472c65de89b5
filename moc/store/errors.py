"""What can be wrong with a checkpoint."""


class CheckpointError(RuntimeError):
    """A checkpoint is missing, incomplete, damaged, or does not fit; the message names what, and the remedy."""


class TakenError(CheckpointError):
    """The place belongs to another job now: this one must not go on writing there."""


class SupersededError(TakenError):
    """Whoever asks has been superseded there, by a newer generation of its job or by another one."""


class MissingRegionError(RuntimeError):
    """Files do not hold all of a tensor that is asked for; the message names it."""


class DamagedRegionError(MissingRegionError):
    """Files hold it, but its bytes are not those that were written; the message names file and tensor."""
