"""The program, all of whose workers use the machine's first GPU; for tests alone (:mod:`tests.gpu.one_gpu`).

``TEST_GPU_ASSERT="RANK ITERATION"``: that worker's device fails an assertion in an iteration, once in the whole job.
``TEST_GPU_HOLD="RANK SHARE"``: that worker holds this share of the device's memory from its first iteration on.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pretrain_gpt_moe as program
from pretrain_gpt_moe import warm_up
from tests.gpu.one_gpu import one_gpu_environment


def disturb() -> None:
    """Prepares what the environment asks for."""
    import torch

    from megatron.pretraining import loop

    iterate, held = loop.iterate, []
    fails = os.environ.get("TEST_GPU_ASSERT", "").split()
    holds = os.environ.get("TEST_GPU_HOLD", "").split()

    def disturbed(run, stop):
        mine = str(run.world.rank)
        if holds and holds[0] == mine and not held:
            total = torch.cuda.get_device_properties(0).total_memory
            held.append(torch.empty(int(float(holds[1]) * total), dtype=torch.uint8, device="cuda"))
        if fails == [mine, str(run.position.iteration + 1)] and _first(Path(os.environ["TEST_GPU_ONCE"])):
            torch._assert_async(torch.zeros((), device="cuda"))  # pyright: ignore[reportPrivateImportUsage]
        return iterate(run, stop)

    loop.iterate = disturbed


def _first(marker: Path) -> bool:
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    warm_up()
    os.environ.update(one_gpu_environment(os.environ))
    disturb()
    sys.exit(program.main())
