"""What optimizers have in common whose state is in fragments, of which nobody but this engine knows."""

from __future__ import annotations

from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer


class FragmentedOptimizer(MixedPrecisionOptimizer):
    """One of megatron-core's optimizers that is not saved as such: its fragments are, like those of any other.

    megatron-core asks for these methods; :mod:`megatron.pretraining.engine.state` is in their place.
    """

    def state_dict(self):
        """Not for saving: see the class."""
        raise NotImplementedError

    def load_state_dict(self, state_dict):
        """See :meth:`state_dict`."""
        raise NotImplementedError

    def sharded_state_dict(self, model_sharded_state_dict, is_loading: bool = False, metadata: dict | None = None):
        """See :meth:`state_dict`."""
        raise NotImplementedError
