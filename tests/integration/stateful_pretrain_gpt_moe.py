"""The program with modules of a user, which keep values from one iteration to the next, different on each worker."""

from __future__ import annotations

import collections
import sys

import pretrain_gpt_moe as program
from pretrain_gpt_moe import warm_up


def classes() -> dict[str, type]:
    """By kind, user modules whose output depends on the values that they keep."""
    import torch
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.moe.router import TopKRouter

    class Router(TopKRouter):
        """Counts its calls in a number and in a container."""

        def __init__(self):
            self.calls, self.last = 0, collections.deque([0], maxlen=3)

        def forward(self, input, padding_mask=None):
            probabilities, routed = super().forward(input, padding_mask)
            self.calls += 1
            self.last.append(self.calls % 5)
            return probabilities * (1 + 0.01 * sum(self.last)), routed

    class Norm(torch.nn.RMSNorm):
        """Keeps an average in a buffer, which changes in place, and one in a tensor, which is replaced."""

        def __init__(self):
            self.register_buffer("average", torch.zeros(()), persistent=False)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.scale = torch.ones(2)

        def forward(self, x):
            output = super().forward(x)
            with torch.no_grad():
                self.average.mul_(0.9).add_(x.float().mean(), alpha=0.1)
                self.calls += 1
                self.scale = self.scale * 0.9 + output.float().abs().mean() * 0.1
            return output * (1 + self.average + 0.01 * self.scale.sum() + 0.001 * (self.calls % 3))

    class Expert(MLP):
        """Has a value that it does not have when it is built."""

        def __init__(self):
            self.known = None

        def forward(self, hidden_states, *more, **options):
            output, bias = super().forward(hidden_states, *more, **options)
            if self.known is None:
                self.known = {}
            self.known["tokens"] = self.known.get("tokens", 0) + len(hidden_states)
            return output * (1 + 0.001 * (self.known["tokens"] % 11)), bias

    return {"router": Router, "norm": Norm, "expert": Expert}


def change(chunks: list) -> list:
    """Makes the modules of model chunks those of a user."""
    kinds = classes()
    for layer in [layer for chunk in chunks for layer in chunk.decoder.layers]:
        become(layer.input_layernorm, kinds["norm"])
        if hasattr(layer.mlp, "router"):
            become(layer.mlp.router, kinds["router"])
            for expert in layer.mlp.experts.local_experts:
                become(expert, kinds["expert"])
    return chunks


def become(module, kind: type) -> None:
    """Changes the class of a module to a user's subclass of it."""
    module.__class__ = kind
    kind.__init__(module)


def change_models() -> None:
    """Has the program change each model that it builds."""
    from megatron.pretraining.entry import gpt

    describe = gpt.gpt_config_from_args

    def described(args):
        config = describe(args)
        config.pre_wrap_hooks.append(change)
        return config

    gpt.gpt_config_from_args = described


if __name__ == "__main__":
    warm_up()
    change_models()
    sys.exit(program.main())
