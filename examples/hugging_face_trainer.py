#!/usr/bin/env python3
"""Trains a tiny Qwen3-MoE with the Trainer of Hugging Face transformers; ``kill -9`` of a worker changes no weight.

python -m moc.launch --nproc-per-node 2 examples/hugging_face_trainer.py --ckpt-dir /tmp/snapshots
"""

import argparse
import hashlib

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainingArguments

import moc.transformers
from moc.cli_output import print_lines


class Counting(torch.utils.data.Dataset):
    """Sequences that count in steps."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        tokens = torch.arange(16) * (index % 7 + 1) % 64
        return {"input_ids": tokens, "labels": tokens}


def main():
    """Trains, and prints the hash of the weights."""
    parser = argparse.ArgumentParser(description="Hugging Face Trainer that survives kill -9.", allow_abbrev=False)
    parser.add_argument("--ckpt-dir", required=True)
    parser.add_argument("--log-dir")
    parser.add_argument("--iterations", type=int, default=100)
    asked = parser.parse_args()
    job = moc.transformers.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        attention_dropout=0.1,
    )
    model = Qwen3MoeForCausalLM(config)
    args = TrainingArguments(
        output_dir=asked.ckpt_dir,
        max_steps=asked.iterations,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        warmup_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = moc.transformers.FaultTolerantTrainer(
        model=model,
        args=args,
        train_dataset=Counting(),
        protection={"policy": "full", "tier": "memory", "directory": asked.ckpt_dir, "log_dir": asked.log_dir},
    )
    trainer.train()
    if job.rank == 0:
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
        print_lines(f"iteration {trainer.state.global_step}: weights {digest.hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
