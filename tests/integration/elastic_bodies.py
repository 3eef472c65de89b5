"""What workers do in tests of elastic training."""

from __future__ import annotations

from megatron.pretraining import loop
from megatron.pretraining.elastic.rebalancing import Prospect
from megatron.pretraining.elastic.replicas import Replicas
from megatron.pretraining.engine.state import MegatronState
from moc.state.detail import Detail
from tests.integration import bodies


def train(flags: dict, pays: bool = True) -> dict:
    """As ``bodies.train``; any other plan pays, or none does.

    Returns:
        Also ``moved``, the bytes that arrived here in each rebalancing; ``state``, the digest of each fragment of an
        expert's master weights, moments and compute weights; and ``steps``, their updates.
    """
    Prospect.pays = lambda self, iterations: pays
    more: dict = {"moved": [], "state": {}, "steps": {}}
    move, run_loop = Replicas.move_to, loop.train

    def watched_move(self, plans) -> int:
        more["moved"].append(move(self, plans))
        return more["moved"][-1]

    def watched_loop(run, stop):
        code = run_loop(run, stop)
        state = MegatronState(run.stepper.chunks, run.stepper.optimizer.core)
        experts = [operator for operator in state.operators() if ".expert." in operator]
        for detail in (Detail.FULL, Detail.COMPUTE):
            for f in state.fragments(experts, detail):
                more["state"][f"{f.name} {f.slot} {f.region}"] = bodies.digest(f.view)
        more["steps"] = {operator: steps for operator, steps in state.steps().items() if operator in experts}
        return code

    Replicas.move_to, loop.train = watched_move, watched_loop
    return bodies.train(flags) | more
