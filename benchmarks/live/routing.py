"""``pretrain_gpt_moe.py``, which tells where its routers send each token: for ``--elastic`` and top-k routing.

Each worker writes ``ROUTES/<process>.jsonl``, a line for each micro batch and layer (benchmarks/faults/ties.py reads
them): iteration, number of the micro batch, layer from 1, for each token its experts as bits of a hexadecimal number,
and how close the choice was where it was close.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

CLOSE = 1e-4
"""Below that, the distance between the last logit that is chosen and the next one is told."""


def tell_routes(directory: Path) -> None:
    """Has this worker, and those that are forked from it, tell where tokens go."""
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron.pretraining.elastic.turns import ElasticTurns

    take, routing, now = ElasticTurns.take, TopKRouter.routing, {"iteration": 0, "micro_batch": 0}

    def taken(self, compute):
        now["iteration"] = self._iteration + 1
        now["micro_batch"] = self._topology.number(self._turn)
        return take(self, compute)

    def routed(self, logits, padding_mask=None):
        probs, chosen = routing(self, logits, padding_mask)
        told = now | {"layer": self.layer_number, "time": time.time()}
        told |= described(logits.detach().view(chosen.shape), chosen, self.topk)
        with open(directory / f"{os.getpid()}.jsonl", "a") as file:  # at once: the worker may be killed
            file.write(json.dumps(told) + "\n")
        return probs, chosen

    ElasticTurns.take, TopKRouter.routing = taken, routed


def described(logits, chosen, topk: int) -> dict[str, Any]:
    """Where tokens go, for JSON.

    Args:
        logits: [tokens, experts].
        chosen: [tokens, experts], true where a token goes to an expert.
        topk: experts of a token.

    Returns:
        ``experts``: of each token, as bits of a hexadecimal number.  ``close``: by number of the token, how far the
        last logit that is chosen is above the next one.
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
