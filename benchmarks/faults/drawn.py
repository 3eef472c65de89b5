"""Draws flags of models, optimizers and engines for runs of a campaign; a pure function of a seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

LEAST = 3
"""Runs that have each value, if there are enough runs."""
_TRIES = 200  # drawn combinations per run, of which the one with the most values that are still missing is taken
_ZERO, _EP2 = "--use-distributed-optimizer", "--expert-model-parallel-size 2"
ONE_NODE = "TP2, DP 1"
"""Layout whose workers are on one node: memory tiers refuse tensor parallelism between nodes."""
SMALL_LAYOUTS = {  # name: (workers, flags)
    "DP2": (2, _ZERO),
    "EP2": (2, f"{_ZERO} {_EP2}"),
    "PP2, DP 1": (2, f"{_ZERO} --pipeline-model-parallel-size 2"),
    ONE_NODE: (2, f"{_ZERO} --tensor-model-parallel-size 2 --sequence-parallel"),
    "EP2, DeepSpeed": (2, f"--deepspeed --zero-stage 2 {_EP2}"),
}
"""Layouts with two workers; groups of one worker are among them."""
_BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1"
_DECAY = "--weight-decay-incr-style linear --start-weight-decay 0.01 --end-weight-decay 0.1"
FLAGS: Mapping[str, Mapping[str, str]] = {
    "loss": {
        "aux": "",
        "seq": "--moe-router-load-balancing-type seq_aux_loss",
        "global": "--moe-router-load-balancing-type global_aux_loss",
        "z": "--moe-z-loss-coeff 0.01",
        "bias": _BIAS,
    },
    "router": {
        "softmax of the selected": "",
        "softmax of all": "--moe-router-pre-softmax",
        "top 1": "--moe-router-topk 1 --moe-router-pre-softmax",
    },
    "biases": {"none": "", "of QKV": "--add-qkv-bias"},
    "mean": {"micro batch": "", "token": "--calculate-per-token-loss"},
    "precision": {"fp32": "", "bf16": "--bf16", "fp16": "--fp16 --initial-loss-scale 1024"},
    "schedule": {
        "linear": "",
        "cosine": "--lr-decay-style cosine --lr-warmup-iters 2 --min-lr 1e-3",
        "weight decay": f"--lr-decay-style constant {_DECAY}",
        "WSD": "--lr-decay-style WSD --lr-wsd-decay-iters 4 --min-lr 1e-3",
    },
    "optimizer": {
        "Adam": "",
        "Adam, other betas": "--adam-beta1 0.8 --adam-beta2 0.9 --adam-eps 1e-6",
        "Adam, clipped": "--clip-grad 0.05 --weight-decay 0.1",
    },
    "duties": {"none": "", "evaluations": "--eval-interval 3 --eval-iters 1"},
}
"""Flags by factor and value."""
EXACT_TIERS = ("memory", "disk", "peers", "sparse, disk", "gradient")
"""Tiers of exact policies, whose runs must end with the bits of runs without faults."""
FACTORS = {name: tuple(values) for name, values in FLAGS.items()} | {
    "layout": tuple(SMALL_LAYOUTS),
    "tier": EXACT_TIERS,
}
"""Values by factor."""


@dataclass(frozen=True)
class DrawnRun:
    """Values of a run by factor."""

    values: Mapping[str, str]

    @property
    def flags(self) -> list[str]:
        """Flags of model and optimizer."""
        return [word for factor, flags in FLAGS.items() for word in flags[self.values[factor]].split()]


def is_valid(values: Mapping[str, str]) -> bool:
    """Returns whether the program accepts these values together."""
    tier = values["tier"]
    return not (
        (tier == "sparse, disk" and values["layout"] != "PP2, DP 1")
        or (values["loss"] == "bias" and values["router"] != "softmax of the selected")
        or (values["layout"] == ONE_NODE and tier == "peers")
    )


def draw_runs(seed: int, count: int) -> tuple[DrawnRun, ...]:
    """Draws valid values for each run; values that fewer than :data:`LEAST` runs have are preferred."""
    chance, drawn, runs = random.Random(seed), Counter[tuple[str, str]](), []
    for _ in range(count):
        tries = ({name: chance.choice(values) for name, values in FACTORS.items()} for _ in range(_TRIES))
        best = max(filter(is_valid, tries), key=lambda values: _missing(drawn, values))
        drawn.update(best.items())
        runs.append(DrawnRun(best))
    return tuple(runs)


def _missing(drawn: Mapping[tuple[str, str], int], values: Mapping[str, str]) -> int:
    return sum(max(0, LEAST - drawn[value]) for value in values.items())
