"""Assigns expert replicas to ranks; every rank computes the same plan from nodes and loads.

A plan places replicas on positions (:mod:`moc.elastic.placement`), assigns positions to nodes so that few experts move,
and divides the experts of a node among its ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import msgspec
import numpy
import xxhash

from moc.elastic import ElasticError
from moc.elastic.allocation import Settings, least_in_each, least_replicas, most_everywhere, spans
from moc.elastic.dispatch import work, work_of
from moc.elastic.placement import EMPTY, holders, place_by_load
from moc.files import decode
from moc.files.decode import MOST, Count
from moc.files.text import shown

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
    def size(self) -> int:
        """Total number of ranks."""
        return len(self.members) * self.ranks

    def experts_of(self, layer: int, rank: int) -> tuple[int, ...]:
        """Returns the experts of a layer that a rank holds, ascending."""
        return tuple(expert for expert in self.tables[layer][rank].tolist() if expert != EMPTY)

    def holders(self, layer: int, expert: int) -> tuple[int, ...]:
        """Returns the ranks that hold an expert, ascending."""
        return tuple(numpy.flatnonzero((self.tables[layer] == expert).any(axis=1)).tolist())

    def held(self, layer: int) -> numpy.ndarray:
        """Returns the replicas of each expert on each rank, 0 or 1, int16[experts, ranks], for the dispatcher."""
        return holders(self.tables[layer], self.experts)

    def domain_of(self, rank: int) -> slice:
        """Returns the ranks of a rank's domain."""
        return next(domain for domain in spans(self._ranks_of_domains) if rank < domain.stop)

    def work(self, layer: int, tokens: Sequence[int]) -> numpy.ndarray:
        """Returns the tokens that each rank computes if domains balance theirs, int64[ranks], from tokens by expert."""
        return work_of(numpy.asarray(tokens, numpy.int64), self.held(layer), self._ranks_of_domains)

    def imbalance(self, layer: int, tokens: Sequence[int]) -> float:
        """Returns the maximum of :meth:`work` divided by its mean; 1.0 without tokens."""
        done = self.work(layer, tokens)
        return float(done.max() / done.mean()) if done.any() else 1.0

    @property
    def _ranks_of_domains(self) -> list[int]:
        return [nodes * self.ranks for nodes in self.domains]

    def held_by_nodes(self, layer: int) -> numpy.ndarray:
        """Returns the replicas of each expert on each node, [experts, nodes], to compute survival.

        Nodes are ordered by column: the first ones of all domains, the second ones, and so on. So the holders of an
        expert are neighbors even in several domains of equal size, which have the same placement.
        """
        by_member = self.held(layer).reshape(self.experts, len(self.members), self.ranks).sum(axis=2)
        starts = numpy.repeat([domain.start for domain in spans(self.domains)], self.domains)
        within = numpy.array(self.columns) - starts
        return by_member[:, numpy.argsort(within, kind="stable")]

    def missing(self, members: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Returns the (layer, expert) pairs without a replica on these nodes."""
        there = numpy.repeat(numpy.isin(self.members, members), self.ranks)
        return tuple(
            (layer, int(expert))
            for layer in sorted(self.tables)
            for expert in numpy.flatnonzero(~self.held(layer)[:, there].any(axis=1))
        )

    def among(self, members: Sequence[int], holds: Sequence[bool]) -> Plan:
        """Returns this plan for other members, before any transfer; in one domain, since no token is dispatched.

        Nodes that hold nothing are last in the order of columns, since nothing depends on their position.

        Args:
            members: active nodes.
            holds: for each of their ranks, whether it still has the experts of this plan; otherwise it has none.
        """
        mine, ranks = {member: number for number, member in enumerate(self.members)}, range(self.ranks)
        rows = [mine[one] * self.ranks + rank if one in mine else -1 for one in members for rank in ranks]
        kept = numpy.array([row >= 0 and held for row, held in zip(rows, holds, strict=True)], dtype=bool)
        tables = {layer: numpy.where(kept[:, None], table[rows], EMPTY) for layer, table in self.tables.items()}
        empty = [not of_node.any() for of_node in kept.reshape(len(members), self.ranks)]
        stood = [len(self.members) if empty[n] else self.columns[mine[one]] for n, one in enumerate(members)]
        order = sorted(range(len(members)), key=lambda number: (stood[number], members[number]))
        columns = numpy.argsort(order)
        return Plan(tuple(members), tuple(columns.tolist()), self.experts, self.ranks, tables, (len(members),))

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
    def from_json(cls, given: Mapping[str, Any]) -> Plan:
        """Returns the plan of a :meth:`to_json` result; without domains in it, the plan has one.

        Raises:
            ValueError: it is not a plan.
        """
        try:
            stored = decode.convert(given, _Stored)
        except ValueError as error:
            raise ElasticError(
                f"it is no plan of experts: {error}. Fix: load a complete checkpoint",
                code="expert-plan-invalid",
            ) from None
        if any(len({*map(len, rows)}) > 1 for rows in stored.tables.values()):
            raise ElasticError(
                "the rows of a table of a plan of experts differ in length. Fix: load a complete checkpoint",
                code="expert-plan-invalid",
            )
        members = len(stored.members)
        domains = (members,) if stored.domains is None else stored.domains
        tables = {layer: numpy.array(rows, numpy.int64) for layer, rows in stored.tables.items()}
        found = cls(stored.members, stored.columns, stored.experts, stored.ranks, tables, domains)
        if problem := _problem(found):
            raise ElasticError(
                f"it is no plan of experts: {problem}. Fix: load a complete checkpoint",
                code="expert-plan-invalid",
            )
        return found

    @property
    def complete(self) -> bool:
        """Whether each domain has every expert of every layer."""
        return all(
            numpy.setdiff1d(table[domain], EMPTY).size == self.experts
            for table in self.tables.values()
            for domain in spans(self._ranks_of_domains)
        )


@dataclass(frozen=True)
class _Stored:
    """JSON form of a plan: tables by layer, rank and slot."""

    members: tuple[Count, ...]
    columns: tuple[Count, ...]
    experts: Count
    ranks: Count
    tables: dict[Count, list[list[Annotated[int, msgspec.Meta(ge=EMPTY, le=MOST)]]]]
    domains: tuple[Count, ...] | None = None


def _problem(plan: Plan) -> str | None:
    """Returns the defect of an untrusted plan, as a clause; None if it is valid."""
    members, domains = len(plan.members), plan.domains
    if not plan.size or len(set(plan.members)) < members:
        return f"its nodes are {shown(list(plan.members))}, with {plan.ranks} workers each"
    if sum(domains) != members or not all(domains):
        return f"its domains {shown(list(domains))} are no cut of {members} nodes"
    if sorted(plan.columns) != list(range(members)):
        return f"its columns are {shown(list(plan.columns))}"
    for layer, table in plan.tables.items():
        if table.ndim != 2 or len(table) != plan.size:
            return f"its table of layer {layer} has not one row for each of {plan.size} ranks"
        numbers = numpy.where(table == EMPTY, plan.experts, table)
        ascending = (numpy.diff(numbers, axis=1) > 0) | (numbers[:, 1:] == plan.experts)
        if (numbers < 0).any() or (table >= plan.experts).any() or not ascending.all() or plan.experts > table.size:
            return f"its table of layer {layer} has not {plan.experts} experts, ascending by rank"
    return None


def plan(members: Sequence[int], loads: Loads, settings: Settings, previous: Plan | None = None) -> Plan:
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
    domains = settings.domains(len(members), experts)
    placed = _placed(loads, domains, settings)
    order = numpy.arange(len(members))
    if previous is not None:
        stood = dict(zip(previous.members, previous.columns, strict=True))
        for domain, tables in zip(spans(domains), placed, strict=True):
            there = members[domain]
            before = {layer: held_before(previous, there, layer) for layer in tables}
            order[domain] = domain.start + columns(before, tables, experts, [stood.get(member) for member in there])
    found = {}
    for layer in sorted(loads):
        table = numpy.concatenate([tables[layer] for tables in placed])
        kept = None if previous is None else held_before(previous, members, layer)
        found[layer] = split(table[order], loads[layer], settings.ranks, kept)
    return Plan(tuple(members), tuple(order.tolist()), experts, settings.ranks, found, domains)


def _placed(loads: Loads, domains: Sequence[int], settings: Settings) -> list[Mapping[int, numpy.ndarray]]:
    """Returns the experts of each node, by domain and layer, int64[nodes, slots].

    Domains of equal size have the same placement, and all have the same experts on every node. Their groups (equation
    1) have the same order, so replicas of maximum rank overlap survive together.
    """
    slots, rows, hot = settings.slots * settings.ranks, [list(loads[layer]) for layer in sorted(loads)], 0
    sizes = dict.fromkeys(domains)
    alike = len(sizes) > 1
    if settings.everywhere is not None:
        hot = settings.everywhere
    fit = {nodes: least_replicas(settings.least, len(rows[0]) - hot, nodes, slots - hot) for nodes in sizes}
    least = least_in_each(settings.least, [fit[nodes] for nodes in domains])
    if settings.everywhere is None:
        hot = min(hottest_everywhere(rows, nodes, slots, least, alike) for nodes in sizes)
    found = {
        nodes: {
            layer: place_by_load(row, nodes, slots, least, hot, alike)
            for layer, row in zip(sorted(loads), rows, strict=True)
        }
        for nodes in sizes
    }
    return [found[nodes] for nodes in domains]


def held_before(previous: Plan, members: Sequence[int], layer: int) -> numpy.ndarray:
    """Returns the experts that each of these nodes held, [nodes, slots of a node]; new nodes held none."""
    table = previous.tables.get(layer)
    if table is None:
        return numpy.full((len(members), 1), EMPTY, numpy.int64)
    by_node = table.reshape(len(previous.members), -1)
    rows = {member: number for number, member in enumerate(previous.members)}
    found = numpy.full((len(members), by_node.shape[1]), EMPTY, numpy.int64)
    for number, member in enumerate(members):
        if member in rows:
            found[number] = by_node[rows[member]]
    return found


TOLERATED = 1.05
"""Work of the busiest node relative to the mean; below this, further experts on every node gain little."""


def hottest_everywhere(loads: Sequence[Sequence[int]], nodes: int, slots: int, least: int, alike: bool = False) -> int:
    """Returns the minimum number of hottest experts on every node that balances the work.

    Maximum rank overlap puts cold experts on the same few nodes, which have little work. Each slot for a hot expert
    there creates more groups of cold experts, and so lowers survival.

    Args:
        loads: tokens of each expert, by layer.
        nodes: nodes that hold replicas.
        slots: slots of each node.
        least: replicas of each expert, reduced if they do not fit.
        alike: as in :func:`moc.elastic.placement.place_by_load`.

    Returns:
        The smallest number for which the busiest node has at most 1.05 times the mean work, averaged over layers. If
        there is none, the number with the least work on the busiest node.

    Raises:
        ValueError: the slots do not suffice for all experts.
    """
    experts, found = len(loads[0]), []
    for count in range(min(most_everywhere(least, experts, nodes, slots), experts - 1) + 1):
        tables = [place_by_load(row, nodes, slots, least, count, alike) for row in loads]
        found.append(float(numpy.mean([imbalance(row, table) for row, table in zip(loads, tables, strict=True)])))
        if found[-1] <= TOLERATED:
            return count
    return int(numpy.argmin(found))


def imbalance(loads: Sequence[int], table: numpy.ndarray) -> float:
    """Returns the work of the busiest node divided by the mean, as balanced by the dispatcher."""
    tokens = numpy.asarray(loads, numpy.int64)
    done = work(tokens, holders(table, len(tokens)))
    return float(done.max() / done.mean()) if tokens.any() else 1.0


_BLOCK = 128
"""Maximum number of nodes that exchange parts with each other; the time grows with its square."""


def columns(
    before: Mapping[int, numpy.ndarray], wanted: Mapping[int, numpy.ndarray], experts: int, stood: Sequence[int | None]
) -> numpy.ndarray:
    """Gives each node a column of a placement: a row of each layer's table.

    All layers have the same permutation: the probability of survival is then the same as for one layer, which is the
    purpose of maximum rank overlap. All permutations survive equally, so the fewest moved experts decide. Nodes keep
    their order, with new ones last, and exchange columns within blocks of 128.

    Args:
        before: by layer, the experts of each node, [nodes, slots]; negative for empty slots.
        wanted: by layer, the placement, [nodes, slots].
        experts: experts of a layer.
        stood: column of each node in the previous placement; None for new nodes.

    Returns:
        The column of each node.
    """
    nodes = len(stood)
    order = numpy.array(sorted(range(nodes), key=lambda node: (stood[node] is None, stood[node] or 0, node)))
    result = numpy.empty(nodes, numpy.int64)
    for start in range(0, nodes, _BLOCK):
        block = order[start : start + _BLOCK]
        part = slice(start, start + len(block))
        shared = sum(_shared(before[layer][block], table[part], experts) for layer, table in wanted.items())
        result[block] = start + matched(numpy.asarray(shared))
    return result


def matched(shared: numpy.ndarray) -> numpy.ndarray:
    """Assigns a column to each row, for a large sum: the largest gains first, then exchanges of two.

    Args:
        shared: gain of each row with each column, [n, n].
    """
    size = len(shared)
    left, result = shared.astype(float), numpy.empty(size, numpy.int64)
    for _ in range(size):
        row, column = divmod(int(left.argmax()), size)
        result[row] = column
        left[row, :] = left[:, column] = -1
    while True:
        gained = shared[:, result]  # gain of each row with the column of each row
        own = gained.diagonal()
        gain = gained + gained.T - own[:, None] - own[None, :]
        one, other = divmod(int(gain.argmax()), size)
        if gain[one, other] <= 0:
            return result
        result[one], result[other] = result[other], result[one]


def _shared(before: numpy.ndarray, wanted: numpy.ndarray, experts: int) -> numpy.ndarray:
    """Returns the number of experts shared by each row of before and wanted, [rows before, rows wanted]."""
    held = numpy.vstack([holders(wanted, experts), numpy.zeros((1, len(wanted)), numpy.int16)])  # last row: empty slots
    return sum(held[before[:, slot]] for slot in range(1, before.shape[1])) + held[before[:, 0]]


def split(table: numpy.ndarray, loads: Sequence[int], ranks: int, before: numpy.ndarray | None = None) -> numpy.ndarray:
    """Distributes the experts of each node among its ranks.

    Experts are dealt by tokens per replica, highest first, each to the least loaded rank with a free slot. Then each
    part is given to the rank that already holds most of it.

    Args:
        table: experts by node, int64[nodes, slots of a node], each at most once; negative for empty slots.
        loads: tokens of each expert.
        ranks: ranks of a node, with equally many slots.
        before: previous experts by node, rank by rank, [nodes, previous slots of a node]; none by default.

    Returns:
        Experts by rank, ascending, int64[nodes * ranks, slots]; empty slots are last.
    """
    nodes, slots = len(table), table.shape[1] // ranks
    if ranks == 1:
        return _ascending(table, len(loads))
    holders = numpy.bincount(table[table != EMPTY], minlength=len(loads))
    weights = numpy.append(numpy.asarray(loads) / numpy.maximum(holders, 1), -1.0)
    hottest_first = numpy.take_along_axis(table, numpy.argsort(-weights[table], axis=1, kind="stable"), axis=1)
    parts = numpy.full((nodes, ranks, slots), EMPTY, numpy.int64)
    work, used, every = numpy.zeros((nodes, ranks)), numpy.zeros((nodes, ranks), numpy.int64), numpy.arange(nodes)
    for expert in hottest_first.T:
        rank = numpy.where(used < slots, work, numpy.inf).argmin(axis=1)
        parts[every, rank, used[every, rank]] = expert
        work[every, rank] += numpy.maximum(weights[expert], 0)
        used[every, rank] += 1
    if before is not None:
        parts = _kept(parts, before.reshape(nodes, ranks, -1))
    return _ascending(parts.reshape(nodes * ranks, slots), len(loads))


def _kept(parts: numpy.ndarray, before: numpy.ndarray) -> numpy.ndarray:
    """Returns each node's parts, reordered to the ranks that hold most of them, the largest overlap first."""
    nodes, ranks, _ = parts.shape
    same = parts[:, None, :, :, None] == before[:, :, None, None, :]
    left = (same & (parts != EMPTY)[:, None, :, :, None]).sum(axis=(3, 4))  # by rank and part
    result, every = numpy.empty_like(parts), numpy.arange(nodes)
    for _ in range(ranks):
        rank, part = numpy.divmod(left.reshape(nodes, -1).argmax(axis=1), ranks)
        result[every, rank] = parts[every, part]
        left[every, rank, :] = -1
        left[every, :, part] = -1
    return result


def _ascending(table: numpy.ndarray, experts: int) -> numpy.ndarray:
    ordered = numpy.sort(numpy.where(table == EMPTY, experts, table), axis=1)
    return numpy.where(ordered == experts, EMPTY, ordered)
