"""Our training loop against a bare loop over the same megatron-core model, schedule and optimizer.

Both run in the same workers, in turns (ours, bare, bare, ours, ...), so that whatever else the machine does meets
both alike.  The bare loop draws the same samples and calls megatron-core's schedule, ``finalize_model_grads`` and
``optimizer.step()``; it reads no loss, logs nothing and saves nothing.

With ``--beside CHECKOUT`` the loop of another checkout takes turns, too.  It and ours then run in workers of their own,
started alike, beside those of the bare loop (``benchmarks/live/beside.py``), and who comes first, second and third
changes from round to round, evenly after each six.

    torchrun --standalone --nproc-per-node 4 benchmarks/train_overhead.py --output docs/results/train_overhead.json \
        --model tiny --mock-data --tokenizer-type NullTokenizer --vocab-size 4095 --pipeline-model-parallel-size 2 ...

Flags that are not the benchmark's own are the trainer's.
"""

from __future__ import annotations

import platform
import resource
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, rotated, write_json
from benchmarks.live.beside import Beside
from benchmarks.live.job import ROOT, free_ports
from benchmarks.save_peers.trainer import begin


def bare_loop(run):
    """A function that trains one iteration with megatron-core alone, on a model of its own."""
    import torch
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron.pretraining.engine.optimizer import optimizer_config
    from megatron.pretraining.model.build import build_gpt, build_model
    from megatron.pretraining.pretrain_gpt_moe import forward_step

    config, topology = run.config, run.stepper.topology
    dataset: Any = run.streams["train"]._dataset if run.streams["train"] else None
    chunks = build_model(config, run.vocabulary.rows, build_gpt)
    optimizer = get_megatron_optimizer(optimizer_config(config), [*chunks], use_gloo_process_groups=False)
    chunks[0].config.finalize_model_grads_func = finalize_model_grads
    chunks[0].config.grad_scale_func = optimizer.scale_loss
    several, forward_backward = len(chunks) > 1, get_forward_backward_func()

    def batches(consumed):
        for indices in topology.samples(consumed):
            samples = torch.utils.data.default_collate([dataset[j] for j in indices])
            yield {k: v.to(topology.world.device) for k, v in samples.items()}

    def iterate(iteration):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        data = batches(iteration * topology.global_batch_size)
        forward_backward(
            forward_step_func=forward_step,
            data_iterator=[data for _ in chunks] if several else data,
            model=[*chunks] if several else chunks[0],
            num_microbatches=len(topology.micro_batches),
            seq_length=config.data.seq_length,
            micro_batch_size=topology.micro_batch_size,
            forward_only=False,
        )
        optimizer.step()

    return iterate


def measure(run, stop, phases, rounds: int, iterations: int) -> dict:
    """Times both loops in turns; a collective call."""
    from benchmarks.save_peers.rounds import gather, timed
    from megatron.pretraining.loop import iterate

    ours = lambda: iterate(run, stop)  # noqa: E731
    timed(ours, 3)
    phases.done("first three iterations")
    peak = peak_memory()  # before the bare loop's model is built beside ours
    loops = {"ours": lambda number: timed(ours, number), "bare": timed_bare(run)}
    seconds = by_turns(loops, rounds, iterations)
    return {"seconds_per_iteration": seconds, "peak_memory_mb": gather(peak), "startup_s": gather(phases.seconds)}


def measure_beside(run, checkout: Path, flags: Sequence[str], rounds: int, iterations: int) -> dict:
    """Times our loop, the bare one and that of another checkout in turns; a collective call."""
    from benchmarks.save_peers.rounds import gather

    ports = gather(free_ports(2))[0]
    jobs = {name: Beside(where, flags, port) for name, where, port in zip(JOBS, (ROOT, checkout), ports, strict=True)}
    loops = {"ours": jobs["ours"].timed, "bare": timed_bare(run), "beside": jobs["beside"].timed}
    for job in jobs.values():
        job.timed(3)
    seconds = by_turns(loops, rounds, iterations)
    told = {name: gather(job.end()["peak_memory_mb"]) for name, job in jobs.items()}
    return {"seconds_per_iteration": seconds, "peak_memory_mb": told["ours"], "beside_peak_memory_mb": told["beside"]}


JOBS = ("ours", "beside")


def timed_bare(run) -> Callable[[int], float]:
    """A function of a number of iterations: seconds for each, by the bare loop, which has run three."""
    from benchmarks.save_peers.rounds import timed

    iterate, done = bare_loop(run), iter(range(10**9))
    bare = lambda: iterate(next(done))  # noqa: E731
    timed(bare, 3)
    return lambda number: timed(bare, number)


def by_turns(loops: Mapping[str, Callable[[int], float]], rounds: int, iterations: int) -> dict[str, list[float]]:
    """By loop, seconds of an iteration in each of its turns."""
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(rounds):
        for name in rotated(list(loops), number):
            seconds[name].append(loops[name](iterations))
    return seconds


def ratio(seconds: Mapping[str, Sequence[float]], name: str, base: str) -> dict[str, float]:
    """Throughput of a loop as a share of another's in the same round: least, median and most."""
    ratios = sorted(b / o for o, b in zip(seconds[name], seconds[base], strict=True))
    return {"min": ratios[0], "median": statistics.median(ratios), "max": ratios[-1]}


def peak_memory() -> int:
    """Most memory that this worker has held, in MB: of the device where there is one, else resident."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() >> 20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main() -> None:
    """Measures, prints the ratio, writes JSON."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="turns of each loop (default: 40)")
    parser.add_argument("--iterations", type=int, default=2, help="iterations in a turn (default: 2)")
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT", help="another checkout, whose loop is measured, too")
    own, flags = parser.parse_known_args()
    trained = [*flags, "--train-iters", "1000000", "--log-interval", str(own.iterations)]
    run, stop, phases = begin(trained)
    import torch
    import torch.distributed as dist

    if own.beside is None:
        result = measure(run, stop, phases, own.rounds, own.iterations)
    else:
        result = measure_beside(run, own.beside, trained, own.rounds, own.iterations)
    seconds = result["seconds_per_iteration"]
    pairs = {"throughput_ratio": ("ours", "bare")}
    if own.beside is not None:
        pairs |= {"beside_throughput_ratio": ("beside", "bare"), "ours_by_beside": ("ours", "beside")}
    found = {name: ratio(seconds, *pair) for name, pair in pairs.items()}
    tokens = run.stepper.topology.global_batch_size * run.config.data.seq_length
    t = {name: tokens / statistics.median(each) for name, each in seconds.items()}
    result |= found | {
        "tokens_per_second": t,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU",
        "torch": torch.__version__,
        "workers": dist.get_world_size(),
        "flags": flags,
    }
    if dist.get_rank() == 0:
        print("tokens/s:", ", ".join(f"{name} {each:.0f}" for name, each in t.items()))
        for name, (one, base) in pairs.items():
            r = found[name]
            spread = f"median {r['median']:.3f} (min {r['min']:.3f}, max {r['max']:.3f})"
            print(f"{one} / {base}: {spread} over {own.rounds} rounds")
        told = f"; start-up: {result['startup_s'][0]}" if own.beside is None else ""
        print(f"peak memory per worker: {result['peak_memory_mb']} MB{told}")
        write_json(own.output, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
