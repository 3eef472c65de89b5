"""Small and large models to convert, which were never trained: the values of a tensor follow from its name and slot."""

from __future__ import annotations

import zlib

import torch

from megatron.pretraining.convert.contents import ConvertedState, Facts, complete_bounds
from moc.inspect.coverage import operator_or_other
from moc.state.operators import Region
from moc.store.shard_file import TensorBox

SLOTS = ("master", "exp_avg", "exp_avg_sq")
HIDDEN, WIDTH, EXPERTS, LAYERS, VOCABULARY = 4, 6, 2, 2, 10
STATE = {
    "iteration": 3,
    "consumed_samples": 24,
    "skipped_iterations": 1,
    "optimizer": "adam",
    "optimizer_step": 2,
    "grad_scaler": None,
    "shape": {"num_layers": LAYERS, "num_experts": EXPERTS, "moe_layer_freq": 1},
    "params_dtype": "bf16",
}


def shapes(hidden: int = HIDDEN, width: int = WIDTH, layers: int = LAYERS) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of a model with experts in all layers, gated, by name."""
    found = {"embedding.word_embeddings.weight": (VOCABULARY, hidden)}
    for layer in range(layers):
        prefix = f"decoder.layers.{layer}."
        found |= {
            f"{prefix}self_attention.linear_qkv.layer_norm_weight": (hidden,),
            f"{prefix}self_attention.linear_qkv.weight": (3 * hidden, hidden),
            f"{prefix}self_attention.linear_proj.weight": (hidden, hidden),
            f"{prefix}mlp.linear_fc1.layer_norm_weight": (hidden,),
            f"{prefix}mlp.router.weight": (EXPERTS, hidden),
        }
        for expert in range(EXPERTS):
            found |= {
                f"{prefix}mlp.experts.experts.{expert}.linear_fc1.weight_w": (width, hidden),
                f"{prefix}mlp.experts.experts.{expert}.linear_fc1.weight_v": (width, hidden),
                f"{prefix}mlp.experts.experts.{expert}.linear_fc2.weight": (hidden, width),
            }
    return found | {"decoder.final_layernorm.weight": (hidden,), "output_layer.weight": (VOCABULARY, hidden)}


class Model(ConvertedState):
    """Contents whose values are made when they are asked for.

    Args:
        parameters: shape of each.
        biased: routers have biases, as slot ``param``.
        steps: number of updates by operator, where it is not 2.
        state: changes to :data:`STATE`.
    """

    def __init__(self, parameters=None, biased: bool = True, steps=None, **state):
        parameters = shapes() if parameters is None else parameters
        self.tensors = [
            TensorBox(name, slot, shape, complete_bounds(shape), torch.float32)
            for name, shape in parameters.items()
            for slot in SLOTS
        ]
        if biased:
            for name in parameters:
                if name.endswith("router.weight"):
                    bias = name.replace("weight", "expert_bias")
                    self.tensors.append(
                        TensorBox(bias, "param", (EXPERTS,), complete_bounds((EXPERTS,)), torch.float32)
                    )
        self.facts = Facts(3, "full", {"world": 2}, STATE | state, 2)
        names = dict.fromkeys(operator_or_other(tensor.name) for tensor in self.tensors)
        self.operators = {name: ("full", (steps or {}).get(name, 2)) for name in names}

    def read(self, name: str, slot: str, region: Region) -> torch.Tensor:
        """See :class:`ConvertedState`."""
        shape = next(tensor.global_shape for tensor in self.tensors if tensor.name == name)
        seed = torch.Generator().manual_seed(zlib.crc32(f"{name} {slot}".encode()))
        return torch.randn(shape, generator=seed)[region.slices()].contiguous()
