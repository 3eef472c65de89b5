"""Assigns each byte of a checkpoint to exactly one of the ranks that hold it."""

from moc.sharding.assignment import (
    SCHEMES,
    Scheme,
    ShardingError,
    assign_items,
    equation_8,
    forced_bytes,
    ideal_bytes,
    loads,
    pec_leaves_ranks_unequal,
    scheme_named,
)
from moc.sharding.parallel_layout import Layout, LayoutError
from moc.sharding.rules import RULES, rule
from moc.sharding.save_items import Item, StateBytes, cut_large, list_save_items

__all__ = [
    "RULES",
    "SCHEMES",
    "Item",
    "Layout",
    "LayoutError",
    "Scheme",
    "ShardingError",
    "StateBytes",
    "assign_items",
    "list_save_items",
    "cut_large",
    "equation_8",
    "forced_bytes",
    "ideal_bytes",
    "loads",
    "pec_leaves_ranks_unequal",
    "rule",
    "scheme_named",
]
