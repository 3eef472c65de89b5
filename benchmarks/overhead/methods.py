"""Defines the checkpoint methods, models and layouts that MoC-System's Figures 10 to 12 compare."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.save_peers.cases import COMMON
from moc.state.operators import Operator


@dataclass(frozen=True)
class Method:
    """One checkpoint method."""

    label: str  # name in tables
    mode: str  # flags of the program
    two_levels: bool = False  # snapshots are kept in memory and persisted from there
    blocking: bool = False  # training waits until a checkpoint is in storage
    k: tuple[int, int] | None = None  # experts of each layer in memory and in storage; None: all

    def flags(self, every: int) -> str:
        """Returns the program's flags for a snapshot every ``every`` iterations; both levels get every snapshot."""
        return f"{self.mode} --persist-interval {every}" if self.two_levels else self.mode


def _moc(label: str, k_snapshot: int, k_persist: int, sharding: str = "EE+AN") -> Method:
    counts = f"--pec-k-snapshot {k_snapshot} --pec-k-persist {k_persist}"
    mode = f"--ckpt-policy pec {counts} --ckpt-tier memory --ckpt-sharding {sharding}"
    return Method(label, mode, two_levels=True, k=(k_snapshot, k_persist))


_FULL_BY = "--ckpt-policy full --ckpt-sharding"
BASELINE, BASE_ASYNC = "baseline", "base-async"
SWEPT = (1, 2, 4, 8, 16)
"""K of both levels, as in Figure 11."""

METHODS = {
    BASELINE: Method("Baseline", f"{_FULL_BY} baseline --ckpt-blocking", blocking=True),
    BASE_ASYNC: Method("Base-Async", f"{_FULL_BY} baseline"),
    "moc-async": _moc("MoC-Async, K 4 and 1", 4, 1),
    **{f"moc-async-k{k}": _moc(f"MoC-Async, K {k} and {k}", k, k) for k in SWEPT},
    **{f"moc-async-k1-{name}": _moc(f"MoC-Async, K 1 and 1, {name}", 1, 1, name) for name in ("EE", "EE+EN")},
    **{f"base-async-{one}": Method(f"Base-Async, {one}", f"{_FULL_BY} {one}") for one in ("EE", "EE+EN", "EE+AN")},
}
DEFAULT = (BASELINE, BASE_ASYNC, "moc-async", "moc-async-k1")
SETS = {
    "swept": (BASELINE, BASE_ASYNC, *(f"moc-async-k{k}" for k in SWEPT)),
    "rules": (
        BASELINE,
        BASE_ASYNC,
        *(f"base-async-{name}" for name in ("EE", "EE+EN", "EE+AN")),
        *(f"moc-async-k1{name}" for name in ("-EE", "-EE+EN", "")),
    ),
}
"""Methods to compare: K on both levels (Figure 11), and sharding schemes (Figure 10)."""

LAYOUTS = {
    "DP4xEP4": ["--expert-model-parallel-size", "4"],  # one expert-parallel group, as in Cases 1 and 2 of Table 2
    "DP4xEP2": ["--expert-model-parallel-size", "2"],  # two groups, as in Case 3
    # The same without ZeRO: both groups hold the same experts, and all ranks hold the rest, so sharding rules apply.
    "DP4xEP2-replicated": ["--expert-model-parallel-size", "2"],
}
_ZERO = "--use-distributed-optimizer"

# GPT-350M-16E (Table 1) made smaller. Experts in all layers make up 94 % of the parameters (there 86 %). Few tokens,
# because a core computes slowly: a checkpoint takes several iterations, as in the paper (2.3 in Case 2).
_FULL = """--num-layers 4 --hidden-size 512 --ffn-hidden-size 2048 --num-attention-heads 8
    --num-experts 16 --seq-length 16 --max-position-embeddings 16 --vocab-size 4095""".split()

_QUICK = """--num-layers 4 --hidden-size 64 --ffn-hidden-size 256 --num-attention-heads 4
    --num-experts 16 --seq-length 16 --max-position-embeddings 16 --vocab-size 511""".split()


def model_flags(quick: bool, layout: str = "", hidden_size: int | None = None) -> list[str]:
    """Returns the flags of a model with 143 M parameters, 2.2 M if ``quick``, or another width.

    Experts are four times as wide as ``hidden_size``; a ``layout`` outside :data:`LAYOUTS` adds no flags.
    """
    flags = [*COMMON, *(_QUICK if quick else _FULL), *LAYOUTS.get(layout, ())]
    if hidden_size is not None:  # the last value of a flag applies
        flags += ["--hidden-size", str(hidden_size), "--ffn-hidden-size", str(4 * hidden_size)]
    return [flag for flag in flags if not (flag == _ZERO and layout.endswith("replicated"))]


def operators_of(flags: list[str]) -> list[Operator]:
    """Returns the operators of the program's model."""
    from megatron.pretraining.entry.offline import config_of_words
    from megatron.pretraining.planning.model import meta_operators

    config = config_of_words([*flags, "--train-iters", "1"], None)
    tokens = config.tokenizer.vocab_size
    assert tokens is not None
    return meta_operators(config, None, tokens + 1)  # NullTokenizer adds one token


def parameters(flags: list[str]) -> dict[str, int]:
    """Returns the number of parameters in ``experts`` and in ``others``, and ``num_experts``."""
    counts, experts = {"experts": 0, "others": 0}, set()
    for operator in operators_of(flags):
        counts["others" if operator.expert is None else "experts"] += operator.parameters
        experts.add(operator.expert)
    return counts | {"num_experts": len(experts - {None})}
