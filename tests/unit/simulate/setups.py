"""A small model on a small cluster."""

import dataclasses

from moc.sharding import ParallelLayout
from moc.simulate.cost import CLUSTERS, Cluster, Work, measured_timing
from moc.simulate.policies import Setup
from tests.model_shape import ModelShape, model_operators

SHAPE = ModelShape(
    expert_layers=(0, 1, 1, 1, 1, 1),
    hidden_size=256,
    ffn_hidden_size=1024,
    query_width=256,
    key_width=256,
    head_width=64,
    vocab_size=1000,
    num_experts=16,
    expert_ffn_hidden_size=512,
    tied=False,
)
OPERATORS = model_operators(SHAPE)
PARAMETERS = sum(operator.parameters for operator in OPERATORS)


def small_cluster(gpus: int = 16, **changes) -> Cluster:
    """Four GPUs a node."""
    return dataclasses.replace(CLUSTERS["a100-80gb"], gpus=gpus, gpus_per_node=4, **changes)


def small_setup(iteration_s: float = 2.0, snapshot_s: float = 5.0, pp: int = 4, **changes) -> Setup:
    """One whose full snapshot takes about so many seconds."""
    layout = ParallelLayout(world=16, pp=pp, ep=4)
    rate = 12 * PARAMETERS / 16 / snapshot_s
    cluster = small_cluster(**{"host_bandwidth": rate, "inter_bandwidth": 400 * rate, "storage_bandwidth": 8 * rate})
    cluster = dataclasses.replace(cluster, **changes)
    return Setup(
        OPERATORS, layout, cluster, measured_timing(iteration_s, 8, pp), Work(hidden_size=256), total_iterations=20_000
    )
