"""The router's auxiliary losses for the step record, reduced by the vote instead of by extra collectives."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.moe_logging import MetricEntry, get_moe_metrics_tracker

from megatron.pretraining.config import Config
from moc.runtime.world import World

# megatron-core's names in its per-layer tracker, by --moe-router-load-balancing-type
_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


class AuxiliaryLosses:
    """Collects the losses that megatron-core's routers track during forward.

    ``micro_batches`` are those of a data-parallel rank, in the mean over all.
    """

    def __init__(self, config: Config, world: World, micro_batches: float):
        self._world, self._micro_batches = world, micro_batches
        self._names = tracked_names(config)
        self._num_moe_layers = config.num_moe_layers
        self._per_layer = config.moe.moe_per_layer_logging
        self._num_layers = config.network.num_layers

    def take(self) -> dict[str, torch.Tensor]:
        """Returns this worker's contributions to the vote, by name (and layer), and clears the tracker."""
        tracker = get_moe_metrics_tracker().metrics
        ballot = {}
        for name in self._names:
            layers = self._share(tracker[name]) if name in tracker else torch.zeros(self._num_layers)
            ballot[name] = layers.sum() / self._num_moe_layers
            if self._per_layer:
                ballot |= {f"moe/{name}_layer_{i}": layers[i] for i in range(self._num_layers)}
        get_moe_metrics_tracker().clear()
        return ballot

    def drop(self) -> None:
        """Clears the tracker, after an iteration that is not reported."""
        get_moe_metrics_tracker().clear()

    def means(self, vote: dict[str, float]) -> dict[str, float]:
        """The voted means, under the names of :meth:`take`."""
        return {name: value for name, value in vote.items() if name in self._names or name.startswith("moe/")}

    def _share(self, entry: MetricEntry) -> torch.Tensor:
        """Scales a worker's values so that their sum over all workers is the mean.

        Values that megatron-core reduces over tensor- (and data-) parallel ranks are partial sums; others are replicas.
        """
        values = entry.values.detach().double() / self._micro_batches
        if entry.reduce_group is None:
            return values / (self._world.tensor_size * self._world.data_size)
        return values / self._world.data_size if entry.needs_dp_avg else values


def tracked_names(config: Config) -> list[str]:
    """Auxiliary losses that the flags enable, by megatron-core's names."""
    moe = config.moe
    if moe.num_experts is None:
        return []
    balancing = _NAMES.get(moe.moe_router_load_balancing_type) if moe.moe_aux_loss_coeff > 0 else None
    return ([balancing] if balancing else []) + (["z_loss"] if moe.moe_z_loss_coeff is not None else [])
