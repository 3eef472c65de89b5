"""Experts of Transformer Engine's grouped linear layers, which have one weight per expert."""

from megatron.pretraining.process import cpu

cpu.install()

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor  # noqa: E402
from megatron.core.transformer import MegatronModule, TransformerConfig  # noqa: E402
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP  # noqa: E402
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from megatron.pretraining.config.together import job_shape  # noqa: E402
from megatron.pretraining.model.parameters import unpartitioned_parameters  # noqa: E402
from moc.state.operators import operator_of  # noqa: E402
from tests.unit.pretraining.flags import parse  # noqa: E402

HIDDEN, WIDTH, LOCAL, RANK, RANKS = 8, 6, 3, 1, 2


class GroupedLinear(torch.nn.Module):
    """Stands in for Transformer Engine's: parameters ``weight0``, ``weight1`` and so on, by place on this rank."""

    def __init__(self, num_gemms, input_size, output_size, *, pg_collection, **options):
        super().__init__()
        self.first = pg_collection.ep.rank() * num_gemms
        for place in range(num_gemms):
            self.register_parameter(f"weight{place}", torch.nn.Parameter(torch.empty(output_size, input_size)))

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Names weights as megatron-core's wrapper does for separate tensors per expert."""
        assert metadata is not None and metadata["singleton_local_shards"]
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{self.first + place}.{prefix}weight", weight.detach(), replica_id=(0, 0, 0)
            )
            for place, (name, weight) in enumerate(self.named_parameters())
        }


@pytest.fixture
def groups():
    """Those of one expert-parallel rank, without connections."""
    dist.init_process_group("fake", rank=RANK, world_size=RANKS, store=FakeStore())
    parallel_state.initialize_model_parallel(expert_model_parallel_size=RANKS, create_gloo_process_groups=False)
    yield get_default_pg_collection()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.parametrize("gated", [True, False])
def test_each_weight_belongs_to_its_expert(groups, gated):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=RANKS * LOCAL,
        moe_ffn_hidden_size=WIDTH,
        gated_linear_unit=gated,
        add_bias_linear=False,
    )
    submodules = GroupedMLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
    model = part = MegatronModule(config)
    for name in ("decoder", "layers", "0", "mlp"):
        part.add_module(name, MegatronModule(config))
        part = part.get_submodule(name)
    part.add_module("experts", TEGroupedMLP(LOCAL, config, submodules, pg_collection=groups))
    described = unpartitioned_parameters(model)
    assert {name: {operator_of(piece.name) for piece in pieces} for name, pieces in described.items()} == {
        f"decoder.layers.0.mlp.experts.{layer}.weight{place}": {f"layers.0.expert.{RANK * LOCAL + place}"}
        for layer in ("linear_fc1", "linear_fc2")
        for place in range(LOCAL)
    }
    parameters = dict(model.named_parameters())
    for name, pieces in described.items():
        assert sum(piece.view.numel() for piece in pieces) == parameters[name].numel()


@pytest.mark.parametrize("shared", [{}, {"moe_single_grouped_weight": True}, {"moe_single_grouped_bias": True}])
def test_experts_update_separately_unless_parameter_is_shared(shared):
    config = parse("--moe-grouped-gemm --disable-bias-linear").replace("moe", **shared)
    assert job_shape(config).has_separate_experts != bool(shared)
