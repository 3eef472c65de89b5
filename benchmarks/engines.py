"""Compares memory and speed of megatron-core's engine with DeepSpeed's ZeRO-1 and ZeRO-2, with the same model and data.

    python benchmarks/engines.py --output docs/results/engines_cpu.json

Each round starts a job for each engine, and the next round reverses the order, so that other load on the machine
affects all engines equally.  A worker's memory is its peak less the memory after its imports.  Losses must be equal: a
faster engine with other results does not count.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, say, show, table, write_json
from benchmarks.live.job import KIND

SIZES = """--hidden-size 512 --ffn-hidden-size 1024 --num-experts 8 --seq-length 64 --vocab-size 4095 --bf16
    --expert-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 8 --lr 1e-4 --log-interval 1""".split()
FEW = "2000000"
ENGINES = {
    "megatron-core, replicated": [],
    "megatron-core, ZeRO-1": ["--use-distributed-optimizer"],
    "DeepSpeed, ZeRO-1": ["--deepspeed", "--zero-reduce-bucket-size", FEW],
    "DeepSpeed, ZeRO-2": ["--deepspeed", "--zero-stage", "2", "--zero-reduce-bucket-size", FEW],
    "DeepSpeed, ZeRO-2, large buckets": ["--deepspeed", "--zero-stage", "2"],
}


def work(iterations: int, flags: list[str]) -> None:
    """Trains as one worker; rank 0 prints the measurements of all workers."""
    import torch

    from benchmarks.save_peers.rounds import gather, timed
    from benchmarks.save_peers.trainer import begin
    from pretrain_gpt_moe import warm_up

    sys.argv[1:] = flags
    warm_up()
    before = _resident()
    run, stop, _ = begin([*flags, "--train-iters", "1000"])
    from megatron.pretraining.loop import iterate

    losses, tell = [], run.log.iteration
    run.log.iteration = lambda record, *others: (losses.append(record.loss), tell(record, *others))
    timed(lambda: iterate(run, stop), 2)
    seconds = timed(lambda: iterate(run, stop), iterations)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    told = dict(memory_mb=gather(peak), seconds=seconds, losses=losses)
    tokens = run.stepper.topology.global_batch_size * run.config.data.seq_length
    if run.world.rank == 0:
        print("TOLD", json.dumps(told | dict(tokens_per_s=tokens / seconds)), flush=True)
    torch.distributed.destroy_process_group()


def _resident() -> float:
    """Returns the resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def measure(engine: str, iterations: int) -> dict:
    """Returns the measurements of one job."""
    from benchmarks.save_peers.launching import OUTPUT, TORCHRUN, launch

    with tempfile.TemporaryDirectory() as directory:
        flags = [*KIND, *SIZES, *ENGINES[engine]]
        launch([sys.executable, *TORCHRUN, __file__, "--work", str(iterations), *flags], Path(directory))
        lines = Path(directory, OUTPUT).read_text().splitlines()
    return json.loads(next(line for line in lines if line.startswith("TOLD ")).removeprefix("TOLD "))


def main() -> int:
    """Measures, prints a table and writes JSON; returns 1 if losses differ."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=4, help="timed in a job, after two others")
    own = parser.parse_args()
    told: dict[str, list[dict]] = {engine: [] for engine in ENGINES}
    for number in range(own.rounds):
        for engine in list(ENGINES)[:: 1 if number % 2 == 0 else -1]:
            told[engine].append(measure(engine, own.iterations))
            seconds, memory = told[engine][-1]["seconds"], max(told[engine][-1]["memory_mb"])
            print(f"round {number + 1}, {engine}: {memory:.0f} MB, {seconds:.2f} s an iteration", flush=True)
    rows = []
    for engine, rounds in told.items():
        memory = max(max(one["memory_mb"]) for one in rounds)
        speed = statistics.median(one["tokens_per_s"] for one in rounds)
        rows.append((engine, f"{memory:.0f}", f"{speed:.0f}"))
    show(80, [(table("engines", ["engine", "MB of a worker, at most", "tokens/s"], rows), [])])
    losses = {tuple(one["losses"]) for rounds in told.values() for one in rounds}
    write_json(own.output, {"machine": machine(), "flags": SIZES, "engines": ENGINES, "rounds": told})
    return 0 if say({"all engines have the same losses, to the last bit": len(losses) == 1}) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(int(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(main())
