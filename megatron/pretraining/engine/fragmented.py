"""Defines the base class of optimizers whose state consists of tensor chunks known only to this engine."""

from __future__ import annotations

from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer


class FragmentedOptimizer(MixedPrecisionOptimizer):
    """Optimizer of megatron-core that is saved only as tensor chunks.

    megatron-core requires these methods; :mod:`megatron.pretraining.engine.state` replaces them.
    """

    def state_dict(self):
        """Not implemented: see the class."""
        raise NotImplementedError

    def load_state_dict(self, state_dict):
        """See :meth:`state_dict`."""
        raise NotImplementedError

    def sharded_state_dict(self, model_sharded_state_dict, is_loading: bool = False, metadata: dict | None = None):
        """See :meth:`state_dict`."""
        raise NotImplementedError
