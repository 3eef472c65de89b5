"""``pretrain_gpt_moe.py`` that records where its routers send each token, for ``--elastic`` and top-k routing.

Each worker writes ``ROUTES/<process>.jsonl``, with a line for each micro batch and layer (read by
benchmarks/faults/ties.py).  A line contains:

* iteration, number of the micro batch, layer from 1;
* the experts of each token, as bits of a hexadecimal number;
* the margins of close choices.
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

    from megatron.pretraining.elastic.moe_layer import ElasticTurns

    take, routing, now = ElasticTurns.take, TopKRouter.routing, {"iteration": 0, "micro_batch": 0}

    def taken(self, compute):
        now["iteration"] = self._iteration + 1
        now["micro_batch"] = self._topology.number(self._turn)
        return take(self, compute)

    def routed(self, logits, padding_mask=None):
        probs, chosen = routing(self, logits, padding_mask)
        told = now | {"layer": self.layer_number, "time": time.time()}
        told |= described(logits.detach().view(chosen.shape), chosen, self.topk)
        with open(directory / f"{os.getpid()}.jsonl", "a") as file:  # unbuffered: the worker may be killed
            file.write(json.dumps(told) + "\n")
        return probs, chosen

    ElasticTurns.take, TopKRouter.routing = taken, routed


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
    sys.exit(program.main())
