"""Measures the time that the description of a run adds before its first iteration.

    python benchmarks/startup_cost.py --output docs/results/startup_cost_cpu.json

The added functions describe a model with 61 layers of 256 experts on 2,048 workers, as DeepSeek-V3 is trained.  The one
collective among them, which gathers a few numbers of each worker, is not included: its time is that of the network.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, write_json
from megatron.pretraining.logging import startup
from moc.cli_output import print_lines
from moc.policy import POLICIES, policy_named
from moc.policy.interval import Every
from moc.state.operators import Operator

_LAYERS, _EXPERTS, _WORKERS, _STAGES = 61, 256, 2048, 16


def operators() -> list[Operator]:
    """Returns the operators of the model."""
    of_layers = (
        [Operator(f"layers.{layer}.mlp", "mlp", layer, None, 10**8)]
        + [Operator(f"layers.{layer}.expert.{one}", "expert", layer, one, 44 * 10**6) for one in range(_EXPERTS)]
        for layer in range(_LAYERS)
    )
    return [operator for layer in of_layers for operator in layer]


def seconds_of(function: Callable, *arguments: object) -> float:
    """Returns the seconds of a call."""
    begun = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - begun


def main() -> int:
    """Measures, prints and writes the seconds of each function; returns the exit code."""
    own = command_line(__doc__).parse_args()
    workers = [
        startup.WorkerFacts(f"node{rank // 8}", "H800", 10**9, 8 * 10**10, rank * _STAGES // _WORKERS, 10**9)
        for rank in range(_WORKERS)
    ]
    stage_of_layer = [layer * _STAGES // _LAYERS for layer in range(_LAYERS)]
    model = operators()
    found = {
        "versions": seconds_of(startup.versions),
        "devices": seconds_of(startup.describe_devices, workers),
        "layout": seconds_of(startup.stage_lines, workers, stage_of_layer),
        "parameters": seconds_of(startup.describe_parameters, model, 8),
        "data": seconds_of(startup.describe_data, startup.DataSizes(10**9, 10**13), 10**9, 4096),
    }
    for name in sorted(POLICIES):
        if name == "selective":
            continue  # its schedule is drawn from a run's tokens
        policy = policy_named(name)(model, Every(4))
        found[f"policy {name}"] = seconds_of(startup.describe_policy, policy, "memory", None, 1.0)
    print_lines(*(f"{name:20} {1e3 * seconds:8.3f} ms" for name, seconds in found.items()))
    print_lines(f"together {1e3 * sum(found.values()):.1f} ms")
    write_json(own.output, {"machine": machine(), "operators": len(model), "workers": _WORKERS, "seconds": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
