"""``pretrain_gpt_moe.py`` that records where its routers send each token, for ``--elastic`` and top-k routing.

Each worker writes ``ROUTES/<process>.jsonl``, with a line for each micro batch and layer (read by
benchmarks/faults/ties.py).  A line contains:

* iteration, number of the micro batch, layer from 1;
* the experts of each token, as bits of a hexadecimal number;
* the margins of close choices.

Its training thread writes the time after each iteration to ``ROUTES/<process>.times``, by a clock that all processes
of the machine share.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

CLOSE = 1e-4
"""Margin between the last chosen logit and the next one below which the choice is recorded as close."""


def tell_routes(directory: Path) -> None:
    """Makes this worker, and workers forked from it, record the routing of tokens."""
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron.pretraining.elastic.moe_layer import ElasticMicroBatchHooks

    take, routing, now = ElasticMicroBatchHooks.run_micro_batch, TopKRouter.routing, {"iteration": 0, "micro_batch": 0}

    def taken(self, compute):
        now["iteration"] = self._iteration + 1
        now["micro_batch"] = self._topology.number(self._round)
        return take(self, compute)

    def routed(self, logits, padding_mask=None):
        probs, chosen = routing(self, logits, padding_mask)
        told = now | {"layer": self.layer_number, "time": time.time()}
        told |= described(logits.detach().view(chosen.shape), chosen, self.topk)
        with open(directory / f"{os.getpid()}.jsonl", "a") as file:  # unbuffered: the worker may be killed
            file.write(json.dumps(told) + "\n")
        return probs, chosen

    ElasticMicroBatchHooks.run_micro_batch, TopKRouter.routing = taken, routed


def tell_times(directory: Path) -> None:
    """Makes the training thread of this worker, and of workers forked from it, record when iterations end."""
    from megatron.pretraining import loop

    iterate = loop.iterate

    def timed(run, stop):
        record = iterate(run, stop)
        with open(directory / f"{os.getpid()}.times", "a") as file:
            file.write(f"{time.monotonic():.4f}\n")
        return record

    loop.iterate = timed


def described(logits, chosen, topk: int) -> dict[str, Any]:
    """Returns the routing of tokens, for JSON.

    Args:
        logits: [tokens, experts].
        chosen: [tokens, experts], true where a token is routed to an expert.
        topk: number of experts of a token.

    Returns:
        ``experts``: the experts of each token, as bits of a hexadecimal number.  ``close``: by number of the token,
        the margin between the last chosen logit and the next one, if it is below :data:`CLOSE`.
    """
    import numpy

    ordered = numpy.sort(logits.numpy(), axis=1)[:, ::-1]
    margins = ordered[:, topk - 1] - ordered[:, topk] if topk < ordered.shape[1] else numpy.full(len(ordered), CLOSE)
    bits = chosen.numpy() @ (1 << numpy.arange(chosen.shape[1]))
    near = numpy.flatnonzero(margins < CLOSE)
    return {"experts": [f"{one:x}" for one in bits], "close": {int(token): float(margins[token]) for token in near}}


if __name__ == "__main__":
    import pretrain_gpt_moe as program

    program.warm_up()
    tell_routes(Path(os.environ["ROUTES"]))
    tell_times(Path(os.environ["ROUTES"]))
    sys.exit(program.main())
