"""The model of the comparison as a DeepSpeed pipeline, and its samples; needs only torch and the peer's DeepSpeed.

It has the shapes of megatron-core's model with :data:`benchmarks.peer_moevement.cases.SHAPE`, and the same number of
parameters: token and position embeddings, blocks of causal attention and a top-1 MoE layer, both after a norm and
without biases, a last norm, and an untied output. No token is dropped, nothing is random.
"""

# DeepSpeed need not be installed where types are checked.
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn


class Embedding(nn.Module):
    """Embedding of tokens, int64 (batch, sequence), to (batch, sequence, hidden)."""

    def __init__(self, vocabulary: int, sequence: int, hidden: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(sequence, hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]


class Block(nn.Module):
    """Attention and experts; maps (batch, sequence, hidden) to the same shape."""

    def __init__(self, hidden: int, heads: int, feed_forward: int, experts: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.projection = nn.Linear(hidden, hidden, bias=False)
        self.experts_norm = nn.LayerNorm(hidden)
        wide, narrow = nn.Linear(hidden, feed_forward, bias=False), nn.Linear(feed_forward, hidden, bias=False)
        expert = nn.Sequential(wide, nn.GELU(), narrow)
        self.experts = MoE(hidden, expert, num_experts=experts, ep_size=1, k=1, drop_tokens=False, use_rts=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, sequence, 3, self.heads, hidden // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, sequence, hidden))
        return x + self.experts(self.experts_norm(x))[0]


class Head(nn.Module):
    """Last norm and logits; maps (batch, sequence, hidden) to (batch, sequence, vocabulary)."""

    def __init__(self, hidden: int, vocabulary: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.output = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.norm(x))


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross entropy."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def pipeline(shape: dict, stages: int) -> PipelineModule:
    """Returns the model of a :data:`benchmarks.peer_moevement.cases.SHAPE`; each process builds its stage."""
    block = (shape["hidden"], shape["heads"], shape["feed_forward"], shape["experts"])
    layers = [
        LayerSpec(Embedding, shape["vocabulary"], shape["sequence"], shape["hidden"]),
        *(LayerSpec(Block, *block) for _ in range(shape["layers"])),
        LayerSpec(Head, shape["hidden"], shape["vocabulary"]),
    ]
    return PipelineModule(layers, num_stages=stages, loss_fn=loss, partition_method="uniform", base_seed=1)


class Samples:
    """Micro batches of the current iteration, different in every iteration and the same when it is computed again.

    Args:
        shape: shape as for :func:`pipeline`.
        data_rank: data-parallel rank of the samples.
        position: returns the number of iterations before the one that starts to draw.
    """

    def __init__(self, shape: dict, data_rank: int, position: Callable[[], int]):
        self._size = (shape["micro_batch"], shape["sequence"] + 1)
        self._vocabulary, self._micro_batches = shape["vocabulary"], shape["micro_batches"]
        self._data_rank, self._position = data_rank, position
        self._drawn = self._before = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        number = self._drawn % self._micro_batches
        if number == 0:
            self._before = self._position()
        self._drawn += 1
        chance = torch.Generator().manual_seed((self._before * self._micro_batches + number) * 1000 + self._data_rank)
        # Squared, so that token frequencies differ and the model can learn.
        tokens = (torch.rand(self._size, generator=chance) ** 2 * self._vocabulary).long()
        return tokens[:, :-1], tokens[:, 1:]
