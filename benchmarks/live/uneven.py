"""``pretrain_gpt_moe.py`` whose routers prefer some experts, like routers of trained models.

Routers of a tiny model that has hardly been trained give all experts a similar number of tokens.  Here each logit is
lowered by more than the logit of the previous expert.  With the initial logits, 3 of 16 experts then get 80 % of the
tokens, like 6 of 32 experts in recorded loads (SmartMoE, ATC 2023).
"""

from __future__ import annotations

import sys

LOWER = 0.08  # difference between the offsets of successive experts' logits; the logits' standard deviation is twice it


def prefer() -> None:
    """Makes the routers of this process prefer some experts, different ones in each layer."""
    import torch
    from megatron.core.transformer.moe.router import TopKRouter

    gating = TopKRouter.gating

    def uneven(self, *args, **options):
        logits = gating(self, *args, **options)
        lower = LOWER * torch.arange(logits.shape[-1], dtype=logits.dtype, device=logits.device)
        return logits - lower.roll(self.layer_number)

    TopKRouter.gating = uneven


if __name__ == "__main__":
    import pretrain_gpt_moe as program

    program.warm_up()
    prefer()
    sys.exit(program.main())
