"""The program, in which an injected signal is one to all of its node; it ends as ``held_pretrain_gpt_moe.py`` does.

``kill`` takes the node as a whole, and ``term`` asks all of its processes to stop, as Slurm does.

At the end, each worker writes digests of its state beside the file that lets it end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pretrain_gpt_moe as program
from pretrain_gpt_moe import warm_up
from tests.integration.held_pretrain_gpt_moe import hold


def lose_whole_nodes() -> None:
    """Sends signals to all processes of a node in place of one worker."""
    import psutil

    from moc.runtime import fault_injection

    def lose(pid: int, number: int) -> None:
        if number not in (signal.SIGKILL, signal.SIGTERM):
            os.kill(pid, number)
            return
        if number == signal.SIGTERM:
            os.kill(psutil.Process(os.getpgrp()).ppid(), number)  # the launcher, which ends by itself after a kill
        os.killpg(os.getpgrp(), number)

    fault_injection.os = _Like(os, kill=lose)  # pyright: ignore[reportAttributeAccessIssue]


def tell_state(directory: Path) -> None:
    """Has each worker write what it holds when training is done: digests of fragments, and their numbers of updates."""
    import torch
    import xxhash

    from megatron.pretraining import loop
    from megatron.pretraining.engine.state import MegatronState
    from moc.state.operators import Detail

    train = loop.train

    def watched(run, stop):
        code = train(run, stop)
        state, told = MegatronState(run.stepper.chunks, run.stepper.optimizer.core, run.stepper.modules), {}
        for detail in (Detail.FULL, Detail.COMPUTE):
            for f in state.fragments(state.operators(), detail):
                content = f.view.view(-1).contiguous().cpu().view(torch.uint8).numpy()
                told[f"{f.name} {f.slot} {f.region}"] = xxhash.xxh3_64_hexdigest(content)
        told |= {f"steps of {name}": str(count) for name, count in state.steps().items()}
        (directory / f"state of {run.world.rank}.json").write_text(json.dumps(told))
        return code

    loop.train = watched


class _Like:
    def __init__(self, module, **ours):
        self.__dict__ |= vars(module) | ours


if __name__ == "__main__":
    warm_up()
    lose_whole_nodes()
    hold(Path(os.environ["TEST_MAY_END"]))
    tell_state(Path(os.environ["TEST_MAY_END"]).parent)
    sys.exit(program.main())
