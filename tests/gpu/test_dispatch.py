"""The dispatch of elastic training on a GPU: the host waits only for the counts of tokens."""

from types import SimpleNamespace
from typing import Any

from megatron.pretraining.process import cpu

cpu.install()

import numpy  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed import HashStore  # noqa: E402  # pyright: ignore[reportPrivateImportUsage]

from megatron.pretraining.elastic.moe_layer import ElasticDispatcher  # noqa: E402
from moc.elastic.dispatch import level_capacities  # noqa: E402

TOKENS, EXPERTS, TOPK, HIDDEN = 512, 8, 2, 64


@pytest.fixture
def dispatcher():
    """One rank holds all experts, in any order of slots."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1, store=HashStore())
    group: Any = dist.group.WORLD
    groups: Any = SimpleNamespace(ep=group, expt_tp=group, tp_ep=group)
    config: Any = SimpleNamespace(moe_router_topk=TOPK)
    dispatcher = ElasticDispatcher(config, groups, group)
    dispatcher.assign((5, 2, None, 0, 7, 1, 6, 3, 4), numpy.ones((EXPERTS, 1), numpy.int64), level_capacities)
    yield dispatcher
    torch.cuda.set_sync_debug_mode("default")
    dist.destroy_process_group()


def passed(dispatcher, inputs, probs):
    """Forward and backward pass through experts that only multiply by the probability."""
    chosen = torch.zeros_like(probs, dtype=torch.bool).scatter_(1, probs.detach().topk(TOPK, dim=1).indices, True)
    sent = dispatcher.dispatch_preprocess(inputs, chosen, probs)
    tokens, _, weights = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*sent))
    returned = dispatcher.token_combine(dispatcher.combine_preprocess(tokens * weights[:, None]))
    output = dispatcher.combine_postprocess(returned)
    return output, chosen, torch.autograd.grad(output.sum(), (inputs, probs))


def test_dispatch_has_no_hidden_wait_and_returns_every_token(dispatcher):
    inputs = torch.randn(TOKENS, 1, HIDDEN, device="cuda", requires_grad=True)
    probs = torch.rand(TOKENS, EXPERTS, device="cuda", requires_grad=True)
    passed(dispatcher, inputs, probs)  # connects, which waits
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # sizes and values that are read from the device raise
    output, chosen, (of_inputs, of_probs) = passed(dispatcher, inputs, probs)
    torch.cuda.set_sync_debug_mode("default")
    weights = (probs * chosen).sum(dim=1)
    torch.testing.assert_close(output[:, 0], inputs[:, 0] * weights[:, None])
    torch.testing.assert_close(of_inputs[:, 0], weights[:, None].expand(-1, HIDDEN))
    torch.testing.assert_close(of_probs, chosen * inputs[:, 0].sum(dim=1, keepdim=True))
