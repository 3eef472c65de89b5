"""What is trained: the model, the grid of partial checkpoints, the faults; and the lost tokens to expect of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

EXPERTS, SEQUENCE, BATCH = 8, 64, 8
K_SNAPSHOT, K_PERSIST = 4, 1  # of the curves: MoC-System, Figure 14(a)
NODES = 2  # of the curves, each with one worker

MODEL_FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --normalization RMSNorm --position-embedding-type rope "
    f"--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --num-experts {EXPERTS} "
    "--moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 "
    f"--seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} --global-batch-size {BATCH} "
    "--lr 3e-3 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --attention-dropout 0 --hidden-dropout 0 "
    "--split 90,10,0 --num-workers 0 --log-interval 1000000"
).split()

TARGETS: Mapping[str, str | None] = {"baseline": None, "W": "weights", "O": "optimizer", "WO": "both", "WO-2L": "both"}
"""By method of Figure 14(a), the ``--pec-target``; None saves everything."""


@dataclass(frozen=True)
class Plan:
    """How much is run.  Faults of curves are equally far apart, each right after a snapshot that is in memory alone."""

    iterations: int = 256  # of a run; faults of the grid follow snapshots if ``2 * max(intervals)`` divides it
    eval_iters: int = 30  # global batches of an evaluation
    ks: tuple[int, ...] = (1, 2, 4, 8)  # K_pec of the grid
    intervals: tuple[int, ...] = (2, 4, 8, 16)  # I_ckpt of the grid, in iterations
    by_load: tuple[tuple[int, int], ...] = ((1, 4), (1, 16), (2, 4), (2, 16))  # K_pec, I_ckpt; load-aware selection too
    methods: tuple[str, ...] = tuple(TARGETS)  # of the curves
    curve_interval: int = 2  # of the curves, iterations between snapshots in storage; memory gets two meanwhile
    curve_faults: int = 3


QUICK = Plan(32, 5, (1, 8), (2,), ((1, 2),), ("WO", "WO-2L"), 2, 1)
"""About a minute, to try the benchmark; so few iterations teach a model nothing."""


@dataclass(frozen=True)
class Cell:
    """One run."""

    kind: str  # ``fault-free``, ``grid`` (one worker, disk tier) or ``curve`` (two nodes, memory tier and storage)
    seed: int  # of weights and of the order of samples
    faults: tuple[int, ...] = ()  # iterations right after which all workers are killed, ascending
    k: int = EXPERTS  # K_pec of the grid
    interval: int = 0  # I_ckpt of storage, in iterations; 0 for no snapshots
    selection: str = "sequential"  # ``sequential`` or ``load_aware``
    method: str = ""  # of the curves, one of :data:`TARGETS`

    @property
    def name(self) -> str:
        """All but the seed."""
        if self.kind == "curve":
            return self.method
        return "fault-free" if self.kind == "fault-free" else f"K={self.k} I={self.interval} {self.selection}"

    @property
    def workers(self) -> int:
        """Processes that train."""
        return NODES if self.kind == "curve" else 1

    @property
    def traced(self) -> bool:
        """Whether its sample has the losses of all iterations."""
        return self.kind == "curve"

    def flags(self, plan: Plan, directory: Path, memory: Path) -> list[str]:
        """Of the training program, but for the data's; ``directory`` gets log and checkpoints."""
        flags = [*MODEL_FLAGS, "--seed", self.seed, "--micro-batch-size", BATCH // self.workers]
        flags += ["--train-iters", plan.iterations, "--lr-warmup-iters", plan.iterations // 12]
        flags += ["--eval-iters", plan.eval_iters, "--log-dir", directory / "log"]
        if self.kind != "fault-free":
            flags += ["--ckpt-dir", directory / "checkpoints", "--ckpt-blocking"]
        if self.kind == "grid":
            flags += ["--snapshot-interval", self.interval]
            flags += ["--ckpt-policy", "pec", "--pec-k", self.k, "--pec-selection", self.selection]
        if self.kind == "curve":
            flags += ["--snapshot-interval", self.interval // 2, "--persist-interval", self.interval]
            flags += ["--ckpt-tier", "memory", "--ckpt-memory-dir", memory]
            flags += ["--node-of-rank", ",".join(map(str, range(NODES)))]
            flags += ["--expert-model-parallel-size", NODES, "--use-distributed-optimizer"]
            flags += ["--eval-interval", plan.iterations // 16, *self._curve_policy()]
        return [str(flag) for flag in flags]

    def lost_nodes(self, fault: int) -> list[int]:
        """Whose memory a fault takes, by its number from 0: of two-level recovery one, each time another; else all."""
        if self.kind != "curve":
            return []
        return [fault % NODES] if self.method == "WO-2L" else list(range(NODES))

    def _curve_policy(self) -> list:
        target = TARGETS[self.method]
        if target is None:
            return ["--ckpt-policy", "full"]
        levels = ["--pec-k-snapshot", K_SNAPSHOT, "--pec-k-persist", K_PERSIST]
        return ["--ckpt-policy", "pec", "--pec-target", target, *levels]


def cells(plan: Plan, seed: int) -> list[Cell]:
    """All runs of one seed: the one without a fault, the grid, the selection by load, the curves."""
    middle = (plan.iterations // 2,)
    grid = [Cell("grid", seed, middle, k, interval) for k in plan.ks for interval in plan.intervals]
    by_load = [Cell("grid", seed, middle, k, interval, "load_aware") for k, interval in plan.by_load]
    distance, later = plan.iterations // (plan.curve_faults + 1), plan.curve_interval // 2
    faults = tuple(distance * (i + 1) + later for i in range(plan.curve_faults))
    curves = [Cell("curve", seed, faults, interval=plan.curve_interval, method=method) for method in plan.methods]
    return [Cell("fault-free", seed), *grid, *by_load, *curves]


def expected_plt(k: int, interval: int, fault: int, iterations: int, experts: int = EXPERTS) -> float:
    """The PLT of one fault, if all experts are equally busy and are saved in turn (MoC-System, eq. 7, by hand).

    At the last snapshot before the fault, K experts of a layer are in the state of that moment, K in that of the
    snapshot before, and so on; none is older than the run's first snapshot, of iteration I_ckpt, which had all of them.

    Args:
        k: K_pec.
        interval: I_ckpt, in iterations.
        fault: iteration right after which training is killed.
        iterations: of the whole training, which T_i of eq. 7 counts.
        experts: N.
    """
    partial_snapshots = fault // interval - 1
    ages = [min(place // k, partial_snapshots) for place in range(experts)]
    return interval * sum(ages) / experts / iterations


def expected(cell: Cell, plan: Plan) -> float | None:
    """The PLT to expect of a run, if all experts are equally busy; None where that does not tell it."""
    # the ledger counts what weights have learned: with "O" all weights are saved, and only moments are stale
    if cell.kind == "fault-free" or cell.method in ("baseline", "O"):
        return 0.0
    if cell.selection != "sequential" or cell.method == "WO-2L":
        return None
    k = K_PERSIST if cell.kind == "curve" else cell.k
    return len(cell.faults) * expected_plt(k, cell.interval, cell.faults[0], plan.iterations)
