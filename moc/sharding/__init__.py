"""Assigns each byte of a checkpoint to exactly one of the ranks that hold it."""

from moc.sharding.assign import SCHEMES, Scheme, ShardingError, assign, loads, scheme_named
from moc.sharding.contents import StateBytes, contents
from moc.sharding.ideal import equation_8, forced_bytes, ideal_bytes, pec_leaves_ranks_unequal
from moc.sharding.item import Item, cut_large
from moc.sharding.layout import Layout, LayoutError
from moc.sharding.rules import RULES, rule

__all__ = [
    "RULES",
    "SCHEMES",
    "Item",
    "Layout",
    "LayoutError",
    "Scheme",
    "ShardingError",
    "StateBytes",
    "assign",
    "contents",
    "cut_large",
    "equation_8",
    "forced_bytes",
    "ideal_bytes",
    "loads",
    "pec_leaves_ranks_unequal",
    "rule",
    "scheme_named",
]
