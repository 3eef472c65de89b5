"""Compares training speed under uneven expert load: elastic replicas, expert parallelism and padding.

Two workers train eight experts; four of them get K times the tokens of the other four.  Expert parallelism places
these four on one worker, the case that elastic replicas address (Lazarus, section 6.4, figure 10, K from 1 to 4).
Routers are forced to choose in this way; everything else is ordinary training.  The jobs take turns of a few
iterations, so that other load on the machine affects all equally.  Each worker has its own processor, kept busy
(``benchmarks/live/processors.py``), because a waiting worker would speed up the other one.

    elastic   --elastic --elastic-slots 5, with a plan for the load
    ep        --expert-model-parallel-size 2, tokens sent without padding
    padded    the same with every expert's input padded to the largest expert's, so that no token is dropped

    python benchmarks/imbalance.py --output docs/results/imbalance_cpu.json
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, say, show, table, write_json
from benchmarks.live.processors import none_idle, own_processor

EXPERTS, SLOTS, TOPK, WORKERS = 8, 5, 2, 2
FLAGS = (
    "--num-layers 2 --hidden-size 256 --ffn-hidden-size 2048 --num-attention-heads 4 --seq-length 256 "
    f"--num-experts {EXPERTS} --moe-router-topk {TOPK} --moe-token-dispatcher-type alltoall --disable-bias-linear "
    "--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 --transformer-impl local --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 1023 --micro-batch-size 8 --global-batch-size 64 --lr 1e-4 "
    "--train-iters 100000 --num-workers 0 --calculate-per-token-loss --eval-iters 0 --log-interval 1000000"
)
MOST = 4
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
CASES = {
    "elastic": f"--elastic --elastic-slots {SLOTS}",
    "ep": f"--expert-model-parallel-size {WORKERS}",
    "padded": f"--expert-model-parallel-size {WORKERS} --moe-pad-expert-input-to-capacity "
    f"--moe-expert-capacity-factor {2 * MOST / (MOST + 1) + 0.01}",
}


class Pair:
    """The two workers of a case, which compute on request."""

    def __init__(self, case: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._workers = [self._start(case, rank, port) for rank in range(WORKERS)]

    def _start(self, case: str, rank: int, port: int) -> subprocess.Popen:
        place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=WORKERS, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        environment = os.environ | {name: str(value) for name, value in place.items()} | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--worker", case]
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **what) -> dict[str, list[float]]:
        """Sends a request to all workers; returns the slowest worker's seconds of each iteration, by clock."""
        for worker in self._workers:
            assert worker.stdin is not None
            print(json.dumps(what), file=worker.stdin, flush=True)
        answers = [self._answer(worker) for worker in self._workers]
        return {clock: [max(all) for all in zip(*(one[clock] for one in answers), strict=True)] for clock in CLOCKS}

    def _answer(self, worker: subprocess.Popen) -> dict:
        assert worker.stdout is not None
        for line in worker.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit("a worker ended; see what it wrote above")

    def end(self) -> None:
        """Kills the workers."""
        for worker in self._workers:
            worker.kill()
            worker.wait()


def work(case: str) -> None:
    """Sets up training as a worker, and runs iterations on request."""
    from benchmarks.save_peers.trainer import begin

    own_processor(int(os.environ["RANK"]))
    run, stop, _ = begin([*FLAGS.split(), *CASES[case].split()])
    from megatron.core.transformer.moe import router

    from megatron.pretraining.elastic.rebalancing import Rebalancer
    from megatron.pretraining.loop import iterate

    forced = Forced()
    router.topk_routing_with_score_function = forced
    for line in sys.stdin:
        asked = json.loads(line)
        forced.ratio = asked["ratio"]
        told: dict[str, list[float]] = {clock: [] for clock in CLOCKS}
        for _ in range(asked["iterations"]):
            begun = {clock: now() for clock, now in CLOCKS.items()}
            iterate(run, stop)
            for clock, now in CLOCKS.items():
                told[clock].append(now() - begun[clock])
        if asked["move"]:
            for rebalancer in (callback for callback in run.callbacks if isinstance(callback, Rebalancer)):
                rebalancer.rebalance(run)
        print(json.dumps(told), flush=True)


class Forced:
    """Replacement for the choice of experts: the first half of them get ``ratio`` times the tokens of the others."""

    ratio = 1

    def __call__(self, logits, topk, **how):
        """Returns the probabilities and the mask of each token's experts, both [tokens, experts]."""
        import torch

        chosen = torch.zeros(logits.shape, dtype=torch.bool)
        chosen.scatter_(1, self._experts(len(logits)), True)
        return torch.softmax(logits.masked_fill(~chosen, float("-inf")), dim=1) * chosen, chosen

    def _experts(self, tokens: int):
        import torch

        weights = [self.ratio] * (EXPERTS // 2) + [1] * (EXPERTS // 2)
        ends = [round(TOPK * tokens * sum(weights[: i + 1]) / sum(weights)) for i in range(EXPERTS)]
        counts = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        row = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(counts))
        order = torch.randperm(tokens, generator=torch.Generator().manual_seed(tokens))
        return row.view(TOPK, tokens).T[order]  # no token gets one expert twice: no expert gets more than all tokens


Seconds = dict[str, dict[str, dict[int, list[float]]]]
"""Seconds of each iteration, by clock, case and ratio."""


def measure(ratios: list[int], rounds: int, iterations: int) -> Seconds:
    """Measures all cases in turns."""
    pairs = {case: Pair(case) for case in CASES}
    seconds: Seconds = {clock: {case: {} for case in CASES} for clock in CLOCKS}
    try:
        for ratio in ratios:
            cases = [case for case in CASES if case != "padded" or ratio == MOST]
            for case in cases:
                pairs[case].ask(ratio=ratio, iterations=1, move=True)  # the former load is forgotten
                pairs[case].ask(ratio=ratio, iterations=1, move=True)
                pairs[case].ask(ratio=ratio, iterations=1, move=False)
            for turn in range(rounds):
                for case in cases if turn % 2 == 0 else reversed(cases):
                    told = pairs[case].ask(ratio=ratio, iterations=iterations, move=False)
                    for clock in CLOCKS:
                        seconds[clock][case].setdefault(ratio, []).extend(told[clock])
                    middle = ", ".join(f"{statistics.median(told[clock]):.3f} s {clock}" for clock in CLOCKS)
                    print(f"{ratio}:1 {case}: {middle}", flush=True)
    finally:
        for pair in pairs.values():
            pair.end()
    return seconds


def speed_of(seconds: dict[str, dict[int, list[float]]]) -> dict[str, dict[int, float]]:
    """Returns the median speed by case and ratio, relative to expert parallelism at 1:1."""
    middle = {case: {ratio: statistics.median(all) for ratio, all in found.items()} for case, found in seconds.items()}
    return {case: {ratio: middle["ep"][1] / s for ratio, s in found.items()} for case, found in middle.items()}


def shown(clock: str, speed: dict[str, dict[int, float]]):
    """Returns a table of speeds."""
    rows = [[f"{k}:1", *(f"{speed[c][k]:.3f}" if k in speed[c] else "" for c in CASES)] for k in speed["ep"]]
    return table(f"Speed relative to expert parallelism at 1:1, {clock} time", ["tokens", *CASES], rows)


def main() -> None:
    """Measures, prints and writes JSON; exits with 1 if a claim does not hold."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="turns of each case (default: 4)")
    parser.add_argument("--iterations", type=int, default=3, help="iterations in a turn (default: 3)")
    parser.add_argument(
        "--ratios", type=int, nargs="*", default=[2, 3], help=f"in addition to 1 and {MOST} (default: 2 3)"
    )
    parser.add_argument("--worker", choices=sorted(CASES), help="for the workers that it starts")
    own = parser.parse_args()
    if own.worker:
        work(own.worker)
        return
    before = machine(load=True)
    ratios = sorted({1, MOST, *own.ratios})
    with none_idle():
        seconds = measure(ratios, own.rounds, own.iterations)
    speeds = {clock: speed_of(found) for clock, found in seconds.items()}
    show(70, [(shown(clock, speed), ()) for clock, speed in speeds.items()])
    speed = speeds["wall"]
    elastic, ep = speed["elastic"], speed["ep"]
    held = {
        f"elastic at {MOST}:1 is at least 0.9 of itself at 1:1": elastic[MOST] >= 0.9 * elastic[1],
        f"elastic at {MOST}:1 is at least 1.3 times expert parallelism": elastic[MOST] >= 1.3 * ep[MOST],
        f"elastic at {MOST}:1 is faster than padding": elastic[MOST] > speed["padded"][MOST],
        "elastic at 1:1 is at least 0.9 of expert parallelism": elastic[1] >= 0.9,
    }
    facts = {"machine": before, "seconds": seconds, "speed": speeds, "held": held, "flags": FLAGS, "cases": CASES}
    write_json(own.output, facts)
    sys.exit(0 if say(held) else 1)


if __name__ == "__main__":
    main()
