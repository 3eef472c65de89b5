"""What workers of a test's world do: they count what routers do."""

from __future__ import annotations

import dataclasses

from megatron.pretraining.engine.routing import RouterCounts
from moc.session.engine import CommitParticipant
from tests.integration.bodies import with_run


class _Counting(CommitParticipant):
    def __init__(self, counts: RouterCounts):
        self._counts, self.seen = counts, []

    def contribution(self) -> dict:
        return self._counts.take()

    def on_totals(self, totals: dict) -> None:
        self.seen.append((*self._counts.by_layer(totals), self._counts.probabilities(totals)))


def count(flags: dict) -> list[dict]:
    """Computes all iterations; of each ``experts``, ``sent`` and ``probabilities``, as :class:`RouterCounts` says."""

    def use(run) -> list[dict]:
        moe = run.config.moe
        layers = [layer for layer, has in enumerate(moe.expert_layers(run.config.network.num_layers)) if has]
        padded, device = moe.moe_pad_expert_input_to_capacity, run.world.device
        counting = _Counting(RouterCounts(run.stepper.chunks, layers, moe.num_experts, padded, device, True))
        stepper = dataclasses.replace(run.stepper, participants=(counting,))
        for iteration in range(run.train_iters):
            stepper.step(iteration, run.batches("train", iteration * stepper.topology.global_batch_size))
            stepper.gather_weights()
        return [{"experts": experts, "sent": sent, "probabilities": sums} for experts, sent, sums in counting.seen]

    return with_run(flags, use)
