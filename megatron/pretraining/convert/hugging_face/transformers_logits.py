"""Computes transformers' logits, as a separate program: megatron-core's CPU substitutes break transformers' models.

It imports only the standard library, numpy, torch and transformers.
"""

from __future__ import annotations

import sys

import numpy
import torch


def main(directory: str, tokens: str, into: str) -> int:
    """Writes the logits of a directory's model for tokens in a file, fp32 of shape (sequences, tokens, vocabulary)."""
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]  # optional

    how = dict(dtype=torch.float32, attn_implementation="eager", local_files_only=True, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(directory, **how).eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(numpy.load(tokens)), use_cache=False).logits
    numpy.save(into, logits.float().numpy())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
