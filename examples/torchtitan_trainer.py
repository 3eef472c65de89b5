#!/usr/bin/env python3
"""A training with torchtitan's Trainer; ``kill -9`` of a worker changes no weight.  Other options are torchtitan's.

python -m moc.launch --nproc-per-node 8 examples/torchtitan_trainer.py --ckpt-dir /tmp/snapshots --module qwen3 \
    --config qwen3_debugmodel --training.disable_cuda_graphs
"""

# pyright: reportMissingImports=false

import argparse

from torchtitan.config import ConfigManager
from torchtitan.tools.logging import init_logger

from moc.torchtitan import FaultTolerantTrainer


def main():
    """Trains; returns the trainer."""
    parser = argparse.ArgumentParser(
        description="torchtitan's Trainer that survives kill -9.", allow_abbrev=False, add_help=False
    )
    parser.add_argument("--ckpt-dir", required=True)
    parser.add_argument("--log-dir")
    parser.add_argument("--ckpt-policy", default="full")
    asked, options = parser.parse_known_args()
    init_logger()
    protection = {"directory": asked.ckpt_dir, "log_dir": asked.log_dir, "policy": asked.ckpt_policy}
    trainer = FaultTolerantTrainer(ConfigManager().parse_args(options), protection)
    trainer.train()
    trainer.close()
    return trainer


if __name__ == "__main__":
    main()
