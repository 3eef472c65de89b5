"""Measures the cost of the digests of the state, as a share of the iteration, with each policy.

    torchrun --standalone --nproc-per-node 1 benchmarks/digest_cost.py --output docs/results/digest_cost_cpu.json

Clocks around the functions of ``Digests`` that an iteration calls sum the time inside them, which is too short to
appear in the duration of an iteration.  On a CPU, a thread reads the state meanwhile; its time is measured, too.  Both
are divided by the duration of the same iterations.  The digest of each iteration is computed (``--digest-interval 1``).

Other flags are passed to the program.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, say, write_json
from benchmarks.live.job import KIND
from benchmarks.module_state_cost import SIZES, WARM_UP, clocked, measure
from benchmarks.save_peers.trainer import begin

GOAL = 0.01
POLICIES = {
    "full": [],
    "sparse": ["--sparse-window", "2"],
    "gradient": [],
    "pec": ["--pec-k", "1"],
    "selective": [],
}


def main() -> int:
    """Measures one policy, prints the share, writes JSON; returns 1 if the goal is missed."""
    parser = command_line(__doc__)
    parser.add_argument("--policy", choices=POLICIES, default="full", help="default: full")
    parser.add_argument("--iterations", type=int, default=40, help="default: 40")
    own, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as storage, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        snapshots = ["--ckpt-policy", own.policy, "--snapshot-interval", "1", "--ckpt-tier", "memory"]
        places = ["--ckpt-dir", storage, "--ckpt-memory-dir", memory]
        flags = [*KIND, *SIZES, *snapshots, *POLICIES[own.policy], *flags]
        run, stop, _ = begin([*flags, *places, "--train-iters", "1000"])
        from moc.session.digests import Digests
        from moc.state.digests import StateDigest

        functions = [(Digests, name) for name in ("completed", "contribution", "on_totals")]
        with clocked([(StateDigest, "compute")]) as read, clocked(functions) as inside:
            measured = measure(run, stop, own.iterations, inside)
        run.session.close()
    share = median(seconds / duration for seconds, duration in measured)
    seconds, duration = (median(one) for one in zip(*measured, strict=True))
    parameters = sum(p.numel() for chunk in run.stepper.chunks for p in chunk.parameters())
    read_s = read[0] / (own.iterations + WARM_UP)
    print(f"{seconds * 1e3:.2f} ms of {duration * 1e3:.0f} ms in each iteration: {share:.3%}")
    print(f"the thread reads the state for {read_s * 1e3:.1f} ms: {read_s / duration:.2%}")
    result = {"machine": machine(), "flags": flags, "goal": GOAL, "share": share, "parameters": parameters}
    write_json(own.output, result | {"inside_s": seconds, "iteration_s": duration, "read_s": read_s})
    return 0 if say({f"digests take at most {GOAL:.0%} of an iteration": share <= GOAL}) else 1


if __name__ == "__main__":
    sys.exit(main())
