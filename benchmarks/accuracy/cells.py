"""Runs of the accuracy benchmark: the model, the grid of partial checkpoints, the faults and the expected PLT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

EXPERTS, SEQUENCE, BATCH = 8, 64, 8
K_SNAPSHOT, K_PERSIST = 4, 1  # K in memory and in storage of the curves: MoC-System, Figure 14(a)
NODES = 2  # nodes of a curve run, each with one worker

MODEL_FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --normalization RMSNorm --position-embedding-type rope "
    f"--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --num-experts {EXPERTS} "
    "--moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 "
    f"--seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} --global-batch-size {BATCH} "
    "--lr 3e-3 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --attention-dropout 0 --hidden-dropout 0 "
    "--split 90,10,0 --num-workers 0 --log-interval 1000000"
).split()

TARGETS: Mapping[str, str | None] = {"baseline": None, "W": "weights", "O": "optimizer", "WO": "both", "WO-2L": "both"}
"""``--pec-target`` by method of Figure 14(a); None saves everything."""


@dataclass(frozen=True)
class Plan:
    """Size of the benchmark.

    The faults of curves are equally spaced. Each follows a snapshot that is only in memory.
    """

    iterations: int = 256  # iterations of a run; grid faults follow snapshots if ``2 * max(intervals)`` divides it
    eval_iters: int = 30  # global batches of an evaluation
    ks: tuple[int, ...] = (1, 2, 4, 8)  # K_pec of the grid
    intervals: tuple[int, ...] = (2, 4, 8, 16)  # I_ckpt of the grid, in iterations
    by_load: tuple[tuple[int, int], ...] = ((1, 4), (1, 16), (2, 4), (2, 16))  # K_pec, I_ckpt; load-aware selection
    methods: tuple[str, ...] = tuple(TARGETS)  # methods of the curves
    curve_interval: int = 2  # iterations between snapshots in storage; memory gets twice as many
    curve_faults: int = 3


QUICK = Plan(32, 5, (1, 8), (2,), ((1, 2),), ("WO", "WO-2L"), 2, 1)
"""Settings for a trial of about a minute; so few iterations teach a model nothing."""


@dataclass(frozen=True)
class Cell:
    """One run."""

    kind: str  # ``fault-free``, ``grid`` (one worker, disk tier) or ``curve`` (two nodes, memory tier and storage)
    seed: int  # seed of the weights and of the sample order
    faults: tuple[int, ...] = ()  # iterations after which all workers are killed, ascending
    k: int = EXPERTS  # K_pec of the grid
    interval: int = 0  # I_ckpt of storage, in iterations; 0: no snapshots
    selection: str = "sequential"  # ``sequential`` or ``load_aware``
    method: str = ""  # method of a curve, one of :data:`TARGETS`

    @property
    def name(self) -> str:
        """Name of the run without its seed."""
        if self.kind == "curve":
            return self.method
        return "fault-free" if self.kind == "fault-free" else f"K={self.k} I={self.interval} {self.selection}"

    @property
    def workers(self) -> int:
        """Number of training processes."""
        return NODES if self.kind == "curve" else 1

    @property
    def traced(self) -> bool:
        """Whether the sample has the losses of all iterations."""
        return self.kind == "curve"

    def flags(self, plan: Plan, directory: Path, memory: Path) -> list[str]:
        """Returns the training program's flags without data flags; ``directory`` gets log and checkpoints."""
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
        """Returns the nodes whose memory a fault destroys.

        Curves lose all nodes' memory, or with two-level recovery one node's in turn. Other runs have no memory tier.

        Args:
            fault: number of the fault, from 0.
        """
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
    """Returns all runs of one seed: without faults, the grid, load-aware selection, the curves."""
    middle = (plan.iterations // 2,)
    grid = [Cell("grid", seed, middle, k, interval) for k in plan.ks for interval in plan.intervals]
    by_load = [Cell("grid", seed, middle, k, interval, "load_aware") for k, interval in plan.by_load]
    distance, later = plan.iterations // (plan.curve_faults + 1), plan.curve_interval // 2
    faults = tuple(distance * (i + 1) + later for i in range(plan.curve_faults))
    curves = [Cell("curve", seed, faults, interval=plan.curve_interval, method=method) for method in plan.methods]
    return [Cell("fault-free", seed), *grid, *by_load, *curves]


def expected_plt(k: int, interval: int, fault: int, iterations: int, experts: int = EXPERTS) -> float:
    """Returns the PLT of one fault for equally busy experts saved in turn (MoC-System, eq. 7, by hand).

    At the last snapshot before the fault, K experts of a layer have their current state, K the state of the previous
    snapshot, and so on. None is older than the run's first snapshot, at iteration I_ckpt, which saved all of them.

    Args:
        k: K_pec.
        interval: I_ckpt, in iterations.
        fault: iteration after which training is killed.
        iterations: iterations of the training, which T_i of eq. 7 counts.
        experts: N.
    """
    partial_snapshots = fault // interval - 1
    ages = [min(place // k, partial_snapshots) for place in range(experts)]
    return interval * sum(ages) / experts / iterations


def expected(cell: Cell, plan: Plan) -> float | None:
    """Returns the expected PLT of a run for equally busy experts; None if eq. 7 does not give it."""
    # The ledger counts tokens that weights have learned. With "O" all weights are saved; only moments are stale.
    if cell.kind == "fault-free" or cell.method in ("baseline", "O"):
        return 0.0
    if cell.selection != "sequential" or cell.method == "WO-2L":
        return None
    k = K_PERSIST if cell.kind == "curve" else cell.k
    return len(cell.faults) * expected_plt(k, cell.interval, cell.faults[0], plan.iterations)
