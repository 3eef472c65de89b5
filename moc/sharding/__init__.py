"""Assigns each byte of a checkpoint to exactly one of the ranks that hold it."""

from moc.sharding.assignment import (
    SCHEMES,
    SaveItem,
    ShardingError,
    ShardingScheme,
    assign_items,
    bytes_by_rank,
    cut_large_items,
    equation_8,
    forced_bytes,
    ideal_bytes,
    parse_scheme,
    pec_leaves_ranks_unequal,
)
from moc.sharding.parallel_layout import LayoutError, ParallelLayout
from moc.sharding.rules import RULES, rule
from moc.sharding.save_items import StateBytes, list_save_items

__all__ = [
    "RULES",
    "SCHEMES",
    "SaveItem",
    "ParallelLayout",
    "LayoutError",
    "ShardingScheme",
    "ShardingError",
    "StateBytes",
    "assign_items",
    "list_save_items",
    "cut_large_items",
    "equation_8",
    "forced_bytes",
    "ideal_bytes",
    "bytes_by_rank",
    "pec_leaves_ranks_unequal",
    "rule",
    "parse_scheme",
]
