"""A tiny model, its layouts, and a short way to train it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from tests.shared import once
from tests.worlds import run_world

FLAGS = dict(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_experts=4,
    moe_router_topk=2,
    moe_aux_loss_coeff=0.01,
    moe_token_dispatcher_type="alltoall",
    seq_length=16,
    position_embedding_type="rope",
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    transformer_impl="local",
    use_distributed_optimizer=True,
    micro_batch_size=1,
    global_batch_size=2,
    train_iters=6,
    lr=3e-3,
    min_lr=3e-4,
    lr_warmup_iters=2,
    lr_decay_iters=30,
    lr_decay_style="cosine",
    tokenizer_type="NullTokenizer",
    vocab_size=255,
    eval_iters=0,
    num_workers=0,
    log_interval=1,
)

SHALLOW = dict(num_layers=2)
FOUR = dict(global_batch_size=4)  # where layouts with four data-parallel workers are compared with others
DEEP = dict(num_layers=4)  # where there are four stages, or chunks of them
EXPERT_BIAS = dict(
    moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.1
)

_TP2 = dict(tensor_model_parallel_size=2, sequence_parallel=True)
LAYOUTS = {  # name: (workers, flags)
    "1": (1, {}),
    "DP2": (2, {}),
    "DP3": (3, {}),
    "DP4": (4, FOUR),
    "DP6": (6, {}),
    "DP4xEP2": (4, FOUR | dict(expert_model_parallel_size=2)),
    "PP2": (2, dict(pipeline_model_parallel_size=2)),
    "PP2xEP2": (4, dict(pipeline_model_parallel_size=2, expert_model_parallel_size=2)),
    "PP2xDP2": (4, dict(pipeline_model_parallel_size=2)),
    "PP2xDP2, 5 nodes": (5, dict(pipeline_model_parallel_size=2)),  # of which one waits, under the launcher
    "PP2xDP3": (6, dict(pipeline_model_parallel_size=2)),
    "PP2xTP2": (4, _TP2 | dict(pipeline_model_parallel_size=2)),
    "PP2xTP2xDP2": (8, _TP2 | dict(pipeline_model_parallel_size=2)),
    "PP2xTP2xDP3": (12, _TP2 | dict(pipeline_model_parallel_size=2)),
    "EP2": (2, dict(expert_model_parallel_size=2)),
    "EP4": (4, FOUR | dict(expert_model_parallel_size=4)),
    "TP2": (2, _TP2),
    "TP2xDP2": (4, _TP2),
    "TP2xEP2": (4, _TP2 | dict(expert_model_parallel_size=2, expert_tensor_parallel_size=1)),
    "PP4": (4, DEEP | dict(pipeline_model_parallel_size=4)),
    "PP4xDP2": (8, DEEP | dict(pipeline_model_parallel_size=4)),
    "plain": (1, dict(engine="plain")),  # of plain PyTorch: see tests/integration/plain.py
    "plain DP2": (2, dict(engine="plain")),
    "interleaved": (2, DEEP | dict(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2)),
}


@dataclass(frozen=True)
class Trained:
    """What all workers of a world told: see :func:`tests.integration.bodies.train`."""

    workers: list[dict]

    @property
    def codes(self) -> list[int]:
        """Exit codes."""
        return [w["code"] for w in self.workers]

    @property
    def start(self) -> int:
        """The iteration from which it went on."""
        return self.workers[0]["start"]

    @property
    def records(self) -> list[dict]:
        """Step records, which all workers agree on but for learning rates of stages without parameters."""
        return self.workers[0]["records"]

    @property
    def losses(self) -> list[float]:
        """Loss of each iteration."""
        return [r["loss"] for r in self.records]

    @property
    def norms(self) -> list[float]:
        """Gradient norm of each iteration."""
        return [r["grad_norm"] for r in self.records]

    @cached_property
    def weights(self) -> dict[str, str]:
        """Digest of each box of the final weights; copies agree."""
        whole: dict[str, str] = {}
        for worker in self.workers:
            for box, digest in worker["weights"].items():
                assert whole.setdefault(box, digest) == digest, f"copies of {box} differ"
        return whole

    @cached_property
    def samples(self) -> dict[int, list[str]]:
        """Digests of the samples that each iteration saw, sorted."""
        seen: dict[int, set[str]] = {}
        for worker in self.workers:
            for iteration, digests in worker["samples"].items():
                seen.setdefault(int(iteration), set()).update(digests)
        return {iteration: sorted(digests) for iteration, digests in seen.items()}


def train(layout: str, flags: dict) -> Trained:
    """Trains the tiny model in a layout; ``flags`` change its flags."""
    size, parallel = LAYOUTS[layout]
    told = run_world(size, "tests.integration.bodies:train", flags=FLAGS | parallel | flags)
    return Trained(told)


def known(layout: str, flags: dict) -> Trained:
    """As :func:`train`, for runs to compare with, which leave nothing behind: each is computed once for all workers."""
    data = [_digest(f"{prefix}.bin") for prefix in flags["data_path"]]  # each worker has a copy of its own
    key = [layout, flags | dict(data_path=data)]
    return Trained(once(key, lambda: train(layout, flags).workers))


@lru_cache
def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
