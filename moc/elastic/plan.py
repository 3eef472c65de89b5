"""Assigns expert replicas to ranks; every rank computes the same plan from nodes and loads.

A plan places replicas on positions (:mod:`moc.elastic.placement`), assigns positions to nodes so that few experts move,
and divides the experts of a node among its ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any

import msgspec
import numpy
import xxhash

from moc.elastic import ElasticError
from moc.elastic.allocation import (
    PlanSettings,
    domain_slices,
    feasible_replicas,
    min_replicas_per_domain,
)
from moc.elastic.dispatch import tokens_per_rank_in_domains
from moc.elastic.objective import LossModel
from moc.elastic.placement import EMPTY, choose_everywhere, place_by_load, replicas_by_node
from moc.files import decode
from moc.files.decode import MAX_COUNT, Count, short_repr

Loads = Mapping[int, Sequence[int]]
"""Tokens of each expert, by layer; all layers have equally many experts."""


@dataclass(frozen=True, eq=False)
class Plan:
    """Assignment of experts to ranks.

    Ranks are numbered node by node, in the order of the members.

    Attributes:
        members: active nodes.
        columns: position of each member in the placement order, which is the same for all layers. Members of a domain
            have the positions of the domain.
        experts: experts of a layer.
        ranks: ranks of a node.
        tables: by layer, the experts of each rank, ascending, int64[total ranks, slots];
            :data:`moc.elastic.placement.EMPTY` after the last one.
        domains: nodes of each domain, in the order of the members; tokens are dispatched only within a domain.
    """

    members: tuple[int, ...]
    columns: tuple[int, ...]
    experts: int
    ranks: int
    tables: Mapping[int, numpy.ndarray] = field(repr=False)
    domains: tuple[int, ...]

    def __post_init__(self):
        for table in self.tables.values():
            table.setflags(write=False)

    @property
    def num_ranks(self) -> int:
        """Total number of ranks."""
        return len(self.members) * self.ranks

    def experts_of(self, layer: int, rank: int) -> tuple[int, ...]:
        """Returns the experts of a layer that a rank holds, ascending."""
        return tuple(expert for expert in self.tables[layer][rank].tolist() if expert != EMPTY)

    def holders(self, layer: int, expert: int) -> tuple[int, ...]:
        """Returns the ranks that hold an expert, ascending."""
        return tuple(numpy.flatnonzero((self.tables[layer] == expert).any(axis=1)).tolist())

    def replica_matrix(self, layer: int) -> numpy.ndarray:
        """Returns the replicas of each expert on each rank, 0 or 1, int16[experts, ranks], for the dispatcher."""
        return replicas_by_node(self.tables[layer], self.experts)

    def domain_of(self, rank: int) -> slice:
        """Returns the ranks of a rank's domain."""
        return next(domain for domain in domain_slices(self._domain_ranks) if rank < domain.stop)

    def tokens_per_rank(self, layer: int, tokens: Sequence[int]) -> numpy.ndarray:
        """Returns the tokens that each rank computes if domains balance theirs, int64[ranks], from tokens by expert."""
        return tokens_per_rank_in_domains(
            numpy.asarray(tokens, numpy.int64), self.replica_matrix(layer), self._domain_ranks
        )

    def imbalance(self, layer: int, tokens: Sequence[int]) -> float:
        """Returns the maximum of :meth:`tokens_per_rank` divided by its mean; 1.0 without tokens."""
        work = self.tokens_per_rank(layer, tokens)
        return float(work.max() / work.mean()) if work.any() else 1.0

    @property
    def _domain_ranks(self) -> list[int]:
        return [nodes * self.ranks for nodes in self.domains]

    def replicas_by_node(self, layer: int) -> numpy.ndarray:
        """Returns the replicas of each expert on each node, [experts, nodes], to compute survival.

        Nodes are ordered by column: the first ones of all domains, the second ones, and so on. So the holders of an
        expert are neighbors even in several domains of equal size, which have the same placement.
        """
        by_member = self.replica_matrix(layer).reshape(self.experts, len(self.members), self.ranks).sum(axis=2)
        starts = numpy.repeat([domain.start for domain in domain_slices(self.domains)], self.domains)
        offsets = numpy.array(self.columns) - starts
        return by_member[:, numpy.argsort(offsets, kind="stable")]

    def replica_counts(self) -> numpy.ndarray:
        """Returns the number of nodes with a replica of each expert, int64[layers, experts]."""
        return numpy.stack([(self.replicas_by_node(layer) > 0).sum(axis=1) for layer in sorted(self.tables)])

    def lost_experts(self, members: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Returns the (layer, expert) pairs without a replica on these nodes."""
        is_present = numpy.repeat(numpy.isin(self.members, members), self.ranks)
        return tuple(
            (layer, int(expert))
            for layer in sorted(self.tables)
            for expert in numpy.flatnonzero(~self.replica_matrix(layer)[:, is_present].any(axis=1))
        )

    def restricted_to(self, members: Sequence[int], has_state: Sequence[bool]) -> Plan:
        """Returns this plan for other members, before any transfer; in one domain, since no token is dispatched.

        Nodes that hold nothing are last in the order of columns, since nothing depends on their position.

        Args:
            members: active nodes.
            has_state: for each of their ranks, whether it still has the experts of this plan; otherwise it has none.
        """
        index_of_member, ranks = {member: number for number, member in enumerate(self.members)}, range(self.ranks)
        rows = [
            index_of_member[member] * self.ranks + rank if member in index_of_member else -1
            for member in members
            for rank in ranks
        ]
        has_experts = numpy.array(
            [row >= 0 and is_stored for row, is_stored in zip(rows, has_state, strict=True)], dtype=bool
        )
        tables = {layer: numpy.where(has_experts[:, None], table[rows], EMPTY) for layer, table in self.tables.items()}
        is_empty = [not node_ranks.any() for node_ranks in has_experts.reshape(len(members), self.ranks)]
        positions = [
            len(self.members) if is_empty[n] else self.columns[index_of_member[member]]
            for n, member in enumerate(members)
        ]
        order = sorted(range(len(members)), key=lambda number: (positions[number], members[number]))
        columns = numpy.argsort(order)
        return Plan(tuple(members), tuple(columns.tolist()), self.experts, self.ranks, tables, (len(members),))

    def with_lost_experts(self, target: Plan) -> Plan:
        """Returns this plan with every lost expert on a rank, in an empty slot or in place of another replica; pure.

        Ranks that hold the expert in ``target``, a plan for the same ranks, are preferred.  The state of lost experts
        must be loaded.
        """
        tables = {}
        for layer, table in self.tables.items():
            table = table.copy()
            for expert in range(self.experts):
                if not (table == expert).any():
                    rank, slot = self._slot_for(table, target.holders(layer, expert))
                    table[rank, slot] = expert
            table.sort(axis=1)
            tables[layer] = numpy.stack([numpy.roll(row, -int((row == EMPTY).sum())) for row in table])
        return replace(self, tables=tables)

    def _slot_for(self, table: numpy.ndarray, preferred: Sequence[int]) -> tuple[int, int]:
        """Returns rank and slot for a lost expert: the slot is empty, or its expert has another replica."""
        replica_counts = numpy.bincount(table[table != EMPTY], minlength=self.experts)
        spare = [
            (
                rank not in preferred,
                -int(replica_counts[current]) if current != EMPTY else -self.num_ranks - 1,
                rank,
                slot,
            )
            for rank, row in enumerate(table.tolist())
            for slot, current in enumerate(row)
            if current == EMPTY or replica_counts[current] > 1
        ]
        return min(spare)[2:]  # the target has a slot for each expert, so this plan has one, too

    @cached_property
    def digest(self) -> str:
        """xxh3-128 in hex; equal plans have equal digests on any machine."""
        about = [self.members, self.columns, self.experts, self.ranks, self.domains]
        hasher = xxhash.xxh3_128(json.dumps(about).encode())
        for layer in sorted(self.tables):
            hasher.update(json.dumps([layer, *self.tables[layer].shape]).encode())
            hasher.update(self.tables[layer].astype("<i8").tobytes())
        return hasher.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def to_json(self) -> dict[str, Any]:
        """Returns a dict for ``json.dumps`` and :meth:`from_json`."""
        tables = {str(layer): table.tolist() for layer, table in sorted(self.tables.items())}
        return {
            "members": list(self.members),
            "columns": list(self.columns),
            "experts": self.experts,
            "ranks": self.ranks,
            "domains": list(self.domains),
            "tables": tables,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Plan:
        """Returns the plan of a :meth:`to_json` result; without domains in it, the plan has one.

        Raises:
            ValueError: it is not a plan.
        """
        try:
            stored = decode.convert(document, _PlanJson)
        except ValueError as error:
            raise ElasticError(
                f"the expert plan is invalid: {error}. Fix: load a complete checkpoint",
                code="expert-plan-invalid",
            ) from None
        if any(len({*map(len, rows)}) > 1 for rows in stored.tables.values()):
            raise ElasticError(
                "the expert plan is invalid: rows of a table differ in length. Fix: load a complete checkpoint",
                code="expert-plan-invalid",
            )
        members = len(stored.members)
        domains = (members,) if stored.domains is None else stored.domains
        tables = {layer: numpy.array(rows, numpy.int64) for layer, rows in stored.tables.items()}
        loaded = cls(stored.members, stored.columns, stored.experts, stored.ranks, tables, domains)
        if defect := _defect(loaded):
            raise ElasticError(
                f"the expert plan is invalid: {defect}. Fix: load a complete checkpoint",
                code="expert-plan-invalid",
            )
        return loaded

    @property
    def is_complete(self) -> bool:
        """Whether each domain has every expert of every layer."""
        return all(
            numpy.setdiff1d(table[domain], EMPTY).size == self.experts
            for table in self.tables.values()
            for domain in domain_slices(self._domain_ranks)
        )


@dataclass(frozen=True)
class _PlanJson:
    """JSON form of a plan: tables by layer, rank and slot."""

    members: tuple[Count, ...]
    columns: tuple[Count, ...]
    experts: Count
    ranks: Count
    tables: dict[Count, list[list[Annotated[int, msgspec.Meta(ge=EMPTY, le=MAX_COUNT)]]]]
    domains: tuple[Count, ...] | None = None


def _defect(plan: Plan) -> str | None:
    """Returns the defect of an untrusted plan, as a clause; None if it is valid."""
    members, domains = len(plan.members), plan.domains
    if not plan.num_ranks or len(set(plan.members)) < members:
        return f"its nodes are {short_repr(list(plan.members))}, with {plan.ranks} workers each"
    if sum(domains) != members or not all(domains):
        return f"its domains {short_repr(list(domains))} do not cover {members} nodes"
    if sorted(plan.columns) != list(range(members)):
        return f"its columns are {short_repr(list(plan.columns))}"
    for layer, table in plan.tables.items():
        if table.ndim != 2 or len(table) != plan.num_ranks:
            return f"its table of layer {layer} does not have one row for each of {plan.num_ranks} ranks"
        numbers = numpy.where(table == EMPTY, plan.experts, table)
        ascending = (numpy.diff(numbers, axis=1) > 0) | (numbers[:, 1:] == plan.experts)
        if (numbers < 0).any() or (table >= plan.experts).any() or not ascending.all() or plan.experts > table.size:
            return f"its table of layer {layer} does not have {plan.experts} experts, ascending by rank"
    return None


def make_plan(members: Sequence[int], loads: Loads, settings: PlanSettings, previous: Plan | None = None) -> Plan:
    """Plans the experts of each rank.

    Args:
        members: active nodes, in the order of their ranks.
        loads: loads of the layers that these ranks train.
        settings: slots, f and h.
        previous: current plan, if any; continuing ranks get parts that they mostly hold already.

    Raises:
        ValueError: the slots do not suffice for all experts.
    """
    experts = len(next(iter(loads.values())))
    domains = settings.domain_sizes(len(members), experts)
    placements = _place_in_domains(loads, domains, settings)
    order = numpy.arange(len(members))
    if previous is not None:
        column_of_member = dict(zip(previous.members, previous.columns, strict=True))
        for domain, tables in zip(domain_slices(domains), placements, strict=True):
            domain_members = members[domain]
            before = {layer: previous_experts(previous, domain_members, layer) for layer in tables}
            order[domain] = domain.start + assign_columns(
                before, tables, experts, [column_of_member.get(member) for member in domain_members]
            )
    rank_tables = {}
    for layer in sorted(loads):
        table = numpy.concatenate([tables[layer] for tables in placements])
        previous_of_rank = None if previous is None else previous_experts(previous, members, layer)
        rank_tables[layer] = split_among_ranks(table[order], loads[layer], settings.ranks, previous_of_rank)
    return Plan(tuple(members), tuple(order.tolist()), experts, settings.ranks, rank_tables, domains)


def _place_in_domains(
    loads: Loads, domains: Sequence[int], settings: PlanSettings
) -> list[Mapping[int, numpy.ndarray]]:
    """Returns the experts of each node, by domain and layer, int64[nodes, slots].

    Domains of equal size have the same placement, and all have the same experts on every node. Their groups (equation
    1) have the same order, so replicas of maximum rank overlap survive together.
    """
    slots, rows, everywhere = settings.slots * settings.ranks, [list(loads[layer]) for layer in sorted(loads)], 0
    sizes = dict.fromkeys(domains)
    same_groups = len(sizes) > 1
    if settings.everywhere is not None:
        everywhere = settings.everywhere
    feasible = {
        nodes: feasible_replicas(settings.min_replicas, len(rows[0]) - everywhere, nodes, slots - everywhere)
        for nodes in sizes
    }
    min_replicas = settings.min_replicas
    if len(domains) > 1:
        min_replicas = min_replicas_per_domain(min_replicas, [feasible[nodes] for nodes in domains])
    if settings.everywhere is None:
        losses = LossModel(settings.mtbf_s)
        everywhere = min(choose_everywhere(rows, nodes, slots, min_replicas, same_groups, losses) for nodes in sizes)
    tables_of_size = {
        nodes: {
            layer: place_by_load(row, nodes, slots, min_replicas, everywhere, same_groups)
            for layer, row in zip(sorted(loads), rows, strict=True)
        }
        for nodes in sizes
    }
    return [tables_of_size[nodes] for nodes in domains]


def previous_experts(previous: Plan, members: Sequence[int], layer: int) -> numpy.ndarray:
    """Returns the experts that each of these nodes held, [nodes, slots of a node]; new nodes held none."""
    table = previous.tables.get(layer)
    if table is None:
        return numpy.full((len(members), 1), EMPTY, numpy.int64)
    by_node = table.reshape(len(previous.members), -1)
    rows = {member: number for number, member in enumerate(previous.members)}
    experts = numpy.full((len(members), by_node.shape[1]), EMPTY, numpy.int64)
    for number, member in enumerate(members):
        if member in rows:
            experts[number] = by_node[rows[member]]
    return experts


_BLOCK = 128
"""Maximum number of nodes that exchange parts with each other; the time grows with its square."""


def assign_columns(
    before: Mapping[int, numpy.ndarray],
    placements: Mapping[int, numpy.ndarray],
    experts: int,
    previous_columns: Sequence[int | None],
) -> numpy.ndarray:
    """Gives each node a column of a placement: a row of each layer's table.

    All layers have the same permutation: the probability of survival is then the same as for one layer, which is the
    purpose of maximum rank overlap. All permutations survive equally, so the fewest moved experts decide. Nodes keep
    their order, with new ones last, and exchange columns within blocks of 128.

    Args:
        before: by layer, the experts of each node, [nodes, slots]; negative for empty slots.
        placements: by layer, the placement, [nodes, slots].
        experts: experts of a layer.
        previous_columns: column of each node in the previous placement; None for new nodes.
    """
    nodes = len(previous_columns)
    order = numpy.array(
        sorted(range(nodes), key=lambda node: (previous_columns[node] is None, previous_columns[node] or 0, node))
    )
    result = numpy.empty(nodes, numpy.int64)
    for start in range(0, nodes, _BLOCK):
        block = order[start : start + _BLOCK]
        part = slice(start, start + len(block))
        shared = sum(
            _count_shared_experts(before[layer][block], table[part], experts) for layer, table in placements.items()
        )
        result[block] = start + assign_greedily(numpy.asarray(shared))
    return result


def assign_greedily(shared: numpy.ndarray) -> numpy.ndarray:
    """Assigns a column to each row, for a large sum: the largest gains first, then exchanges of two.

    Args:
        shared: gain of each row with each column, [n, n].
    """
    size = len(shared)
    remaining, result = shared.astype(float), numpy.empty(size, numpy.int64)
    for _ in range(size):
        row, column = divmod(int(remaining.argmax()), size)
        result[row] = column
        remaining[row, :] = remaining[:, column] = -1
    while True:
        gains = shared[:, result]  # gain of each row with the column of each row
        own = gains.diagonal()
        gain = gains + gains.T - own[:, None] - own[None, :]
        first, second = divmod(int(gain.argmax()), size)
        if gain[first, second] <= 0:
            return result
        result[first], result[second] = result[second], result[first]


def _count_shared_experts(before: numpy.ndarray, placement: numpy.ndarray, experts: int) -> numpy.ndarray:
    """Returns the number of experts shared by each row of before and wanted, [rows before, rows wanted]."""
    replicas = numpy.vstack(
        [replicas_by_node(placement, experts), numpy.zeros((1, len(placement)), numpy.int16)]
    )  # last row: empty slots
    return sum(replicas[before[:, slot]] for slot in range(1, before.shape[1])) + replicas[before[:, 0]]


def split_among_ranks(
    table: numpy.ndarray, loads: Sequence[int], ranks: int, previous_table: numpy.ndarray | None = None
) -> numpy.ndarray:
    """Distributes the experts of each node among its ranks.

    Experts are dealt by tokens per replica, highest first, each to the least loaded rank with a free slot. Then each
    part is given to the rank that already holds most of it.

    Args:
        table: experts by node, int64[nodes, slots of a node], each at most once; negative for empty slots.
        loads: tokens of each expert.
        ranks: ranks of a node, with equally many slots.
        previous_table: previous experts by node, rank by rank, [nodes, previous slots of a node]; none by default.

    Returns:
        Experts by rank, ascending, int64[nodes * ranks, slots]; empty slots are last.
    """
    nodes, slots = len(table), table.shape[1] // ranks
    if ranks == 1:
        return _sort_experts(table, len(loads))
    holders = numpy.bincount(table[table != EMPTY], minlength=len(loads))
    weights = numpy.append(numpy.asarray(loads) / numpy.maximum(holders, 1), -1.0)
    hottest_first = numpy.take_along_axis(table, numpy.argsort(-weights[table], axis=1, kind="stable"), axis=1)
    parts = numpy.full((nodes, ranks, slots), EMPTY, numpy.int64)
    loads_of_ranks, used, all_nodes = (
        numpy.zeros((nodes, ranks)),
        numpy.zeros((nodes, ranks), numpy.int64),
        numpy.arange(nodes),
    )
    for expert in hottest_first.T:
        rank = numpy.where(used < slots, loads_of_ranks, numpy.inf).argmin(axis=1)
        parts[all_nodes, rank, used[all_nodes, rank]] = expert
        loads_of_ranks[all_nodes, rank] += numpy.maximum(weights[expert], 0)
        used[all_nodes, rank] += 1
    if previous_table is not None:
        parts = _assign_parts_to_holders(parts, previous_table.reshape(nodes, ranks, -1))
    return _sort_experts(parts.reshape(nodes * ranks, slots), len(loads))


def _assign_parts_to_holders(parts: numpy.ndarray, previous_table: numpy.ndarray) -> numpy.ndarray:
    """Returns each node's parts, reordered to the ranks that hold most of them, the largest overlap first."""
    nodes, ranks, _ = parts.shape
    is_same = parts[:, None, :, :, None] == previous_table[:, :, None, None, :]
    overlaps = (is_same & (parts != EMPTY)[:, None, :, :, None]).sum(axis=(3, 4))  # by rank and part
    result, all_nodes = numpy.empty_like(parts), numpy.arange(nodes)
    for _ in range(ranks):
        rank, part = numpy.divmod(overlaps.reshape(nodes, -1).argmax(axis=1), ranks)
        result[all_nodes, rank] = parts[all_nodes, part]
        overlaps[all_nodes, rank, :] = -1
        overlaps[all_nodes, :, part] = -1
    return result


def _sort_experts(table: numpy.ndarray, experts: int) -> numpy.ndarray:
    ordered = numpy.sort(numpy.where(table == EMPTY, experts, table), axis=1)
    return numpy.where(ordered == experts, EMPTY, ordered)
