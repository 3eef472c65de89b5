"""Configures command lines of the program as on a machine with a GPU.

Reads JSON from standard input: lists of the number of workers and the words.  Writes an object for each command line:
its error, or some of Megatron-LM's arguments.  A process of its own, since the simulated device stays.
"""

import importlib
import json
import sys

from benchmarks.command_lines import simulate_device
from megatron.pretraining.config import ConfigError

NAMES = (
    "num_layers", "hidden_size", "num_experts", "moe_router_topk", "bf16", "world_size",
    "data_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "train_iters",
    "exit_interval",
)  # fmt: skip


def main() -> None:
    """Answers for all command lines."""
    simulate_device()
    offline = importlib.import_module("megatron.pretraining.entry.offline")
    found = []
    for workers, words in json.load(sys.stdin):
        try:
            arguments = offline.config_of_words(words, workers).arguments
        except ConfigError as error:
            found.append({"error": str(error)})
        else:
            found.append({name: getattr(arguments, name) for name in NAMES})
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
