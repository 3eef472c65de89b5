"""Logits by transformers: a program of its own, since what megatron-core needs on a CPU breaks transformers' models.

Nothing of this package is imported here but the standard library, torch and transformers.
"""

from __future__ import annotations

import sys

import numpy
import torch


def main(directory: str, tokens: str, into: str) -> int:
    """Writes the logits, fp32 of shape (sequences, tokens, vocabulary), of a directory's model for tokens in a file."""
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]  # optional

    how = dict(dtype=torch.float32, attn_implementation="eager", local_files_only=True, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(directory, **how).eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(numpy.load(tokens)), use_cache=False).logits
    numpy.save(into, logits.float().numpy())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
