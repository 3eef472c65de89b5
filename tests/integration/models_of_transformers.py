"""Makes small models with transformers: a program of its own, since what megatron-core needs on a CPU breaks them.

    python tests/integration/models_of_transformers.py DIRECTORY

Each directory in DIRECTORY has a ``config.json`` and ``zeros.json``, parts of the names of weights that are zeros.
Beside them come ``read.json``, the configuration as transformers understands it; ``saved/``, a model with random
weights; ``logits.pt``, of the tokens in DIRECTORY; and ``default/config.json``, of a small model with nothing chosen.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM  # pyright: ignore[reportMissingImports]  # optional

SMALL = dict(vocab_size=200, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=64, intermediate_size=48, num_experts_per_tok=2)  # fmt: skip


def main(root: Path) -> None:
    """Makes one model for each directory."""
    tokens = torch.load(root / "tokens.pt")
    for directory in sorted(path for path in root.iterdir() if path.is_dir()):
        config = AutoConfig.from_pretrained(directory)
        (directory / "read.json").write_text(json.dumps(config.to_dict()))
        chosen = {} if config.model_type != "glm4_moe" else dict(num_nextn_predict_layers=0)
        type(config)(**SMALL, **chosen).save_pretrained(directory / "default")
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        _fill(model, json.loads((directory / "zeros.json").read_text()))
        model.save_pretrained(directory / "saved")
        with torch.no_grad():
            torch.save(model(tokens).logits, directory / "logits.pt")


def _fill(model: torch.nn.Module, zeros: list[str]) -> None:
    """Random weights, norms around one, so that no two tensors can be exchanged unnoticed."""
    generator = torch.Generator().manual_seed(1)
    states = [*model.named_parameters(), *((name, b) for name, b in model.named_buffers() if "e_score" in name)]
    with torch.no_grad():
        for name, tensor in states:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1 + ("norm.weight" in name))
            if "layernorm.weight" in name:
                tensor.add_(1)
            if any(part in name for part in zeros):
                tensor.zero_()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
