"""Measures a peer: DeepSpeed's ``save_checkpoint``, blocking with either of its engines, and its decoupled writer.

It uses DeepSpeed's own MoE layers because DeepSpeed does not save the experts of a megatron-core model: data, expert
and ZeRO-2 parallelism, bf16 with fp32 masters and moments. The model has the matrices and norms of the other peers'
model, with the same number of parameters, but no position embedding. There is no PP2 x EP2: DeepSpeed's pipeline module
assumes that layers of data-parallel workers are identical, and saves one worker's. Experts would be lost.

Two repairs let it run on the CPU. The inference kernel is not compiled. Views with a gradient function, which the
decoupled writer cannot send to its process, are detached.
"""

# DeepSpeed need not be installed where types are checked, and is loosely typed.
# pyright: reportMissingImports=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.save_peers.rounds import Clock, Saver, arguments, measure, write_result

MODES = ("blocking", "fast", "decoupled")


class EngineSaver(Saver):
    """Saves with ``engine.save_checkpoint``.

    The decoupled writer shares memory with training, so the engine waits for it in the next iteration, before it
    updates the weights. The clock includes that wait.
    """

    def __init__(self, engine, clock: Clock):
        self._engine, self._clock, self._complete = engine, clock, 0.0
        self._commit = engine._commit_decoupled_checkpoint
        engine._commit_decoupled_checkpoint = self._timed_commit

    def begin(self, directory: Path) -> None:
        """Saves, or sends the state to the writer process."""
        self._engine.save_checkpoint(str(directory), tag="step")
        self._complete = time.perf_counter()

    def finish(self) -> float:
        """Returns the time of completion; the engine has already waited."""
        return self._complete

    def _timed_commit(self) -> None:
        pending = self._engine.checkpoint_engine.get_commit_info() is not None
        with self._clock.still(), contextlib.redirect_stdout(io.StringIO()):
            self._commit()
        if pending:
            self._complete = time.perf_counter()


def shape(flags: list[str]) -> argparse.Namespace:
    """Returns the sizes of the model in the trainer's flags."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    model = "num-layers hidden-size ffn-hidden-size num-attention-heads num-experts vocab-size"
    for name in f"{model} seq-length micro-batch-size expert-model-parallel-size".split():
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser.parse_known_args(flags)[0]


def build_model(sizes: argparse.Namespace):
    """Returns a GPT of DeepSpeed's MoE layers, top-1."""
    import torch
    import torch.nn.functional as F
    from deepspeed.moe.layer import MoE
    from torch import nn

    hidden, rows = sizes.hidden_size, sizes.vocab_size + 1

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)

        def forward(self, x):
            batch, tokens, _ = x.shape
            heads = self.into(x).view(batch, tokens, 3, sizes.num_attention_heads, -1).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
            return self.out(mixed.transpose(1, 2).reshape(x.shape))

    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.into = nn.Linear(hidden, sizes.ffn_hidden_size, bias=False)
            self.out = nn.Linear(sizes.ffn_hidden_size, hidden, bias=False)

        def forward(self, x):
            return self.out(F.gelu(self.into(x)))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.attention, self.between = nn.LayerNorm(hidden), Attention(), nn.LayerNorm(hidden)
            experts = dict(num_experts=sizes.num_experts, ep_size=sizes.expert_model_parallel_size)
            self.experts = MoE(hidden, Expert(), **experts, k=1, capacity_factor=1.5)

        def forward(self, x):
            x = x + self.attention(self.before(x))
            routed, balance, _ = self.experts(self.between(x))
            return x + routed, balance

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(rows, hidden)
            self.layers = nn.ModuleList(Layer() for _ in range(sizes.num_layers))
            self.norm, self.output = nn.LayerNorm(hidden), nn.Linear(hidden, rows, bias=False)

        def forward(self, tokens):
            x, balances = self.embedding(tokens[:, :-1]), torch.zeros(())
            for layer in self.layers:
                x, balance = layer(x)
                balances = balances + balance
            logits = self.output(self.norm(x)).float()
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) + 0.01 * balances

    return Model()


def build_engine(model, sizes: argparse.Namespace, mode: str):
    """Returns DeepSpeed's engine: ZeRO-2, bf16, torch's AdamW."""
    import deepspeed
    import torch
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    settings = {
        "train_micro_batch_size_per_gpu": sizes.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    if mode != "blocking":
        settings["checkpoint"] = {"writer": {"type": "python", "decoupled": mode == "decoupled"}}
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-4), config=settings)
    return engine


def repair() -> None:
    """Lets DeepSpeed save on the CPU and without its launcher; see the module docstring."""
    os.environ |= {"CROSS_SIZE": "1", "CROSS_RANK": "0"}  # number of machines, index; normally from its launcher
    import deepspeed.runtime.zero.stage_1_and_2 as zero

    backend: Any = sys.modules["deepspeed.comm.torch"]
    backend.build_shm_op = lambda: None
    optimizer = zero.DeepSpeedZeroOptimizer
    with_gradient = optimizer._get_groups_without_padding
    optimizer._get_groups_without_padding = lambda self, groups: [g.detach() for g in with_gradient(self, groups)]


def count_parameters(model, expert_parallel: int) -> int:
    """Returns the model's number of parameters; a worker holds its share of the experts and all others."""
    shares = {True: 0, False: 0}
    for name, parameter in model.named_parameters():
        shares["deepspeed_experts" in name] += parameter.numel()
    return shares[False] + expert_parallel * shares[True]


def main() -> int:
    """Measures one mode."""
    own, flags = arguments(__doc__, MODES)
    sizes = shape(flags)
    import deepspeed
    import torch
    import torch.distributed as dist

    repair()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(1 + dist.get_rank())
    model = build_model(sizes)
    parameters = count_parameters(model, sizes.expert_model_parallel_size)
    engine = build_engine(model, sizes, own.mode)

    def iterate():
        tokens = torch.randint(0, sizes.vocab_size, (sizes.micro_batch_size, sizes.seq_length + 1))
        engine.backward(engine(tokens))
        engine.step()

    clock = Clock()
    saver = EngineSaver(engine, clock)
    result = measure(saver, clock, iterate, own)
    if engine.checkpoint_engine.is_decoupled():
        engine.checkpoint_engine.cleanup()
    write_result(own.result, result | {"parameters": parameters})
    return 0


if __name__ == "__main__":
    sys.exit(main())
