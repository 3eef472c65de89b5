"""Baseline job that saves with ``torch.distributed.checkpoint`` and resumes from it when torchrun restarts it.

Model, data and optimizer are the same as in ``pretrain_gpt_moe.py``; this repository's fault tolerance is not used.
``dcp.async_save`` copies the state after every N-th iteration and writes it in a thread.  A checkpoint is complete when
its ``.metadata`` exists, which torch writes last.  Positions are a tensor, so that only torch's own pickle is read.

    torchrun --nproc-per-node 4 --max-restarts 3 benchmarks/live/dcp_job.py --checkpoints DIR --every 1 FLAGS...
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

from moc.cli_output import Parser

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

KEPT = 2


def complete(directory: Path) -> list[Path]:
    """Returns the complete checkpoints, oldest first."""
    return sorted(path.parent for path in directory.glob("iter_*/.metadata"))


def main() -> None:
    """Trains until it is killed."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--every", type=int, required=True, help="iterations between checkpoints")
    own, flags = parser.parse_known_args()

    from benchmarks.save_peers.trainer import begin

    run, stop, _ = begin(flags)
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_loader import load

    from benchmarks.save_peers.torch_dcp import DcpSaver, state_dict
    from megatron.pretraining.engine.state import MegatronState
    from megatron.pretraining.loop import iterate, prepare

    position = torch.zeros(2, dtype=torch.int64)  # iterations, samples
    state = state_dict(run.stepper.chunks, run.stepper.optimizer.core) | {"position": position}
    if found := complete(own.checkpoints):
        begun = time.perf_counter()
        load(state, checkpoint_id=found[-1])
        iterations, samples = map(int, position.tolist())
        run.session.position = replace(run.position, iteration=iterations, consumed_samples=samples)
        training = MegatronState(run.stepper.chunks, run.stepper.optimizer.core, run.stepper.modules)
        training.set_steps(dict.fromkeys(training.steps(), iterations))
        run.stepper.scheduler.step(samples)
        run.log.events.write("resume", iteration=iterations, tier="dcp", seconds=time.perf_counter() - begun)
    saver = DcpSaver(state, "thread")
    prepare(run)
    while run.position.iteration < run.train_iters:
        iterate(run, stop)
        if run.position.iteration % own.every == 0:
            saver.finish()
            if dist.get_rank() == 0:
                for old in complete(own.checkpoints)[:-KEPT]:
                    (old / ".metadata").unlink()  # first, so that a partly removed checkpoint is incomplete
                    shutil.rmtree(old)
            position.copy_(torch.tensor([run.position.iteration, run.position.consumed_samples]))
            saver.begin(own.checkpoints / f"iter_{run.position.iteration:07d}")


if __name__ == "__main__":
    main()
