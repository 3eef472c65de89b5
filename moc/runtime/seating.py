"""Assigns nodes to rank blocks and to parts of the model, and adds newly arrived nodes; no I/O.

A job has one *rank block* for each node of ``--nnodes``.  A block determines the ranks of its node's workers.  Surplus
nodes are spares, which replace lost nodes.  A job may run on fewer nodes than it has blocks.  Its *members* are the
blocks that train in this generation.

A copy of the model is cut into *parts* of one node each, such as pipeline stages.  A job trains with the complete
copies that its nodes form.  Members are in rank order, copy by copy: the member at position i has part i % parts.  The
last members are *partial-model nodes*: surplus nodes of a part, with its state.

New nodes initialize their workers in the background.  When they are ready, the next generation includes them.  A
partial-model node moves to another part of the model in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moc.runtime.orders import Cause, GenerationReason, Kill, Order, StartWorker, WorkerRecord
from moc.runtime.termination import USAGE


@dataclass
class LiveWorkers:
    """Training workers, and joining workers of new nodes.

    Attributes:
        workers: workers with a rank among the members, by name.
        joining: joining workers, which initialize in the background, by name.
        started_count: number of workers ever started.
    """

    workers: dict[str, WorkerRecord] = field(default_factory=dict)
    joining: dict[str, WorkerRecord] = field(default_factory=dict)
    started_count: int = 0

    def new_name(self, generation: int) -> str:
        """Returns a name, unique in the job, for a worker to be started."""
        self.started_count += 1
        return f"{generation}.{self.started_count}"

    @property
    def survive_resize(self) -> bool:
        """Whether the program continues in the same processes when the members change."""
        return any(worker.survives_resize for worker in self.workers.values())

    def remove_node(self, node: int) -> None:
        """Drops all workers of a node."""
        self.workers = {name: worker for name, worker in self.workers.items() if worker.node != node}
        self.joining = {name: worker for name, worker in self.joining.items() if worker.node != node}


@dataclass
class RankBlocks:
    """Assignment of nodes to rank blocks, which are numbered from 0 and determine the ranks of workers.

    A node keeps its number in any block.

    Attributes:
        count: number of rank blocks.
        min_members: fewest members that the job can run on; default: ``count``.
        members: rank blocks that train, in the order of ranks: all of them if the job needs all, otherwise none before
            the job begins.
        node_of_block: by rank block, the node that fills it or filled it last.
        vacant: rank blocks whose node is lost.
        connected: connected nodes, including spares.
    """

    count: int
    min_members: int = 0
    members: tuple[int, ...] = ()
    node_of_block: dict[int, int] = field(default_factory=dict)
    vacant: set[int] = field(default_factory=set)
    connected: set[int] = field(default_factory=set)

    def __post_init__(self):
        self.min_members = self.min_members or self.count
        if not self.is_elastic:
            self.members = tuple(range(self.count))

    @property
    def is_elastic(self) -> bool:
        """Whether the number of members may change."""
        return self.min_members < self.count

    def block_of(self, node: int) -> int | None:
        """Returns the rank block of a node, or its last one if the node is lost; None if it has none."""
        return next((block for block, owner in self.node_of_block.items() if owner == node), None)

    def add_node(self, node: int, previous_block: int | None) -> int | None:
        """Adds a node and assigns its previous rank block, the block of its number, or the block of a lost node.

        Args:
            node: its number.
            previous_block: rank block of its live workers; None if it has none.

        Returns:
            Its rank block; None for a spare.
        """
        self.connected.add(node)
        block = self.block_of(node)
        if block is None:
            own_block = node if node < self.count else None
            free_blocks = (
                candidate
                for candidate in (previous_block, own_block)
                if candidate is not None and (candidate in self.vacant or candidate not in self.node_of_block)
            )
            block = next(free_blocks, min(self.vacant, default=None))  # at first, rank block i waits for node i
        if block is not None:
            self._fill(block, node)
        return block

    def remove_node(self, node: int, replace: bool = True) -> tuple[int | None, int | None]:
        """Marks a node as lost.

        Args:
            node: its number.
            replace: a spare fills its rank block now; otherwise :meth:`fill_vacant_blocks` does so later.

        Returns:
            The rank block that it filled, and the spare that fills it now; each None if there is none or the node was
            lost already.
        """
        self.connected.discard(node)
        block = self.block_of(node)
        if block is None or block in self.vacant:
            return None, None
        self.vacant.add(block)
        spare = self._spare if replace else None
        if spare is not None:
            self._fill(block, spare)
        return block, spare

    def fill_vacant_blocks(self) -> None:
        """Assigns vacant rank blocks to spares."""
        for block in sorted(self.vacant):
            if (spare := self._spare) is not None:
                self._fill(block, spare)

    @property
    def _spare(self) -> int | None:
        return min((node for node in self.connected if self.block_of(node) is None), default=None)

    def node_in(self, block: int) -> int | None:
        """Returns the connected node that fills a rank block, or None."""
        node = self.node_of_block.get(block)
        return node if node in self.connected and block not in self.vacant else None

    @property
    def is_complete(self) -> bool:
        """Whether there are members and each has a connected node."""
        return bool(self.members) and all(self.node_in(block) is not None for block in self.members)

    @property
    def filled_blocks(self) -> tuple[int, ...]:
        """Rank blocks with a connected node, ascending."""
        return tuple(block for block in range(self.count) if self.node_in(block) is not None)

    @property
    def is_known(self) -> bool:
        """Whether each member's node is connected or lost; after a takeover the state of others is still unknown."""
        return all(block in self.vacant or self.node_in(block) is not None for block in self.members)

    def missing_nodes(self) -> list[int]:
        """Returns the nodes to wait for: lost nodes that left a vacant rank block, and nodes that never joined."""
        if self.is_complete or (self.is_elastic and len(self.filled_blocks) >= self.min_members):
            return []
        blocks = (block for block in range(self.count) if block in self.vacant or block not in self.node_of_block)
        return [self.node_of_block.get(block, block) for block in blocks]

    def _fill(self, block: int, node: int) -> None:
        self.node_of_block[block] = node
        self.vacant.discard(block)


@dataclass(frozen=True)
class NodeCandidate:
    """A node that could train.

    Attributes:
        block: rank block of the node.
        model_part: part of the model that its workers have initialized; None if it has no workers.
        has_state: its workers have the state of that part.
    """

    block: int
    model_part: int | None = None
    has_state: bool = False


def model_part_of(position: int, members: int, nodes_per_model: int, partial_model_parts: Sequence[int]) -> int:
    """Returns the part of the model of the member at a position in rank order.

    Args:
        position: position of the member.
        members: number of members, including partial-model nodes.
        nodes_per_model: nodes of a model copy.
        partial_model_parts: parts of the last members, the partial-model nodes.
    """
    index = position - (members - len(partial_model_parts))
    return partial_model_parts[index] if partial_model_parts and index >= 0 else position % nodes_per_model


def ready_copies(candidates: Iterable[NodeCandidate], nodes_per_model: int) -> int:
    """Returns the number of model copies that nodes form without initializing workers."""
    model_parts = [candidate.model_part for candidate in candidates]
    return min(model_parts.count(part) for part in range(nodes_per_model))


def assign_nodes(candidates: Iterable[NodeCandidate], nodes_per_model: int, copies: int) -> tuple[int, ...]:
    """Assigns nodes to positions: each keeps its part of the model, unless the part has more nodes than copies.

    Among surplus nodes of a part, those with its state have priority.  Remaining positions go to nodes without workers,
    then to nodes initialized for another part.

    Args:
        candidates: nodes, at least ``parts * copies``.
        nodes_per_model: nodes of a copy.
        copies: number of copies.

    Returns:
        The rank block at each position in rank order.
    """
    ordered, by_part = sorted(candidates, key=lambda candidate: candidate.block), []
    for part in range(nodes_per_model):
        same_part = [candidate for candidate in ordered if candidate.model_part == part]
        by_part.append(sorted(same_part, key=lambda candidate: not candidate.has_state)[:copies])
    assigned = [candidate for part_nodes in by_part for candidate in part_nodes]
    remaining = iter(sorted((candidate for candidate in ordered if candidate not in assigned), key=_preference))
    for copy in range(copies):
        for part_nodes in by_part:
            part_nodes += [next(remaining)] if len(part_nodes) <= copy else []
    blocks_by_part = [sorted(candidate.block for candidate in part_nodes) for part_nodes in by_part]
    return tuple(part_nodes[copy] for copy in range(copies) for part_nodes in blocks_by_part)


def partial_model_nodes(
    candidates: Iterable[NodeCandidate], nodes_per_model: int, assigned: Sequence[int], future: Sequence[int]
) -> tuple[NodeCandidate, ...]:
    """Returns the partial-model nodes: they have state of a part, are in no copy, and keep their part in the future.

    If two parts differ by two nodes or more, a node that changes its part forms another copy.  It does not train as a
    partial-model node, and is free for initialization with the other part.

    Args:
        candidates: nodes.
        nodes_per_model: nodes of a copy.
        assigned: rank blocks in the current copies, in rank order.
        future: the same when workers are initialized for the maximum number of copies.

    Returns:
        These nodes, sorted by part and rank block.
    """
    future_parts = {block: position % nodes_per_model for position, block in enumerate(future)}
    free = (
        candidate
        for candidate in candidates
        if candidate.has_state and candidate.model_part is not None and candidate.block not in assigned
    )
    unmoved = (
        candidate
        for candidate in free
        if future_parts.get(candidate.block, candidate.model_part) == candidate.model_part
    )
    return tuple(sorted(unmoved, key=lambda candidate: (candidate.model_part, candidate.block)))


def _preference(candidate: NodeCandidate) -> tuple[bool, bool, int]:
    return candidate.model_part is not None, candidate.has_state, candidate.block


@dataclass
class RankAssignment:
    """Assignment of nodes to positions in rank order; the nodes of complete model copies are first.

    Attributes:
        blocks: assignment of nodes to rank blocks; its members are in rank order.
        workers_per_node: workers per node.
        live: live workers.
        nodes_per_model: nodes per copy of the program's model.
        partial_model_parts: model part of each partial-model node; these are the last members.
        refused_sizes: numbers of nodes in complete copies that the program refuses.
    """

    blocks: RankBlocks
    workers_per_node: int
    live: LiveWorkers
    nodes_per_model: int = 1
    partial_model_parts: tuple[int, ...] = ()
    refused_sizes: set[int] = field(default_factory=set)

    @property
    def nodes_in_copies(self) -> int:
        """Number of members in complete copies; the others are partial-model nodes."""
        return len(self.blocks.members) - len(self.partial_model_parts)

    @property
    def ready_blocks(self) -> tuple[int, ...]:
        """Rank blocks of connected nodes that are members, or whose joining workers are all ready to train."""
        ready = Counter(self.blocks.block_of(worker.node) for worker in self.live.joining.values() if worker.is_ready)
        members = self.blocks.members
        return tuple(
            block for block in self.blocks.filled_blocks if block in members or ready[block] == self.workers_per_node
        )

    def largest_assignment(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Returns members that form as many copies as these blocks allow and the program accepts, or none.

        Nodes without workers, or with another part of the model, must initialize workers first.
        """
        candidates = self._candidates(blocks)
        return (
            self._assignment_of_copies(candidates, len(candidates) // self.nodes_per_model)
            if len(candidates) >= self.blocks.min_members
            else ()
        )

    def ready_assignment(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Returns members that form the maximum number of copies from these blocks without initialization, or none."""
        candidates = self._candidates(blocks)
        return self._assignment_of_copies(candidates, ready_copies(candidates, self.nodes_per_model))

    def _assignment_of_copies(self, candidates: Sequence[NodeCandidate], copies: int) -> tuple[int, ...]:
        copy_counts = range(copies, max(1, self.blocks.min_members // self.nodes_per_model) - 1, -1)
        copies = next((number for number in copy_counts if number * self.nodes_per_model not in self.refused_sizes), 0)
        return assign_nodes(candidates, self.nodes_per_model, copies)

    def reassign(self, keeps_workers: bool) -> None:
        """Makes connected nodes the members.

        Args:
            keeps_workers: ready workers keep their part of the model.  The copies that they form train immediately, and
                surplus nodes are partial-model nodes.  Otherwise all workers are initialized again.
        """
        future = self.largest_assignment(self.blocks.filled_blocks)
        copies = (self.ready_assignment(self.ready_blocks) if keeps_workers else ()) or future
        candidates = self._candidates(self.blocks.filled_blocks)
        partial = (
            partial_model_nodes(candidates, self.nodes_per_model, copies, future)
            if keeps_workers and self.nodes_per_model > 1
            else ()
        )
        self.blocks.members = (*copies, *(candidate.block for candidate in partial))
        self.partial_model_parts = tuple(
            candidate.model_part for candidate in partial if candidate.model_part is not None
        )

    def remove_partial_model_nodes(self) -> None:
        """Removes the partial-model nodes from the members."""
        self.blocks.members, self.partial_model_parts = self.blocks.members[: self.nodes_in_copies], ()

    def moves_member(self, future: Sequence[int]) -> bool:
        """Returns whether a member has another part of the model among these future members."""
        model_parts = {block: self._model_part_at(position) for position, block in enumerate(self.blocks.members)}
        return any(
            model_parts.get(block, position % self.nodes_per_model) != position % self.nodes_per_model
            for position, block in enumerate(future)
        )

    def _candidates(self, blocks: Iterable[int]) -> list[NodeCandidate]:
        """Returns rank blocks as candidates, with the model parts of their nodes' workers."""
        return [self._candidate(block) for block in blocks]

    def _candidate(self, block: int) -> NodeCandidate:
        if block in self.blocks.members:
            ready = sum(
                worker.is_ready for worker in self.live.workers.values() if self.blocks.block_of(worker.node) == block
            )
            return NodeCandidate(
                block, self._model_part_at(self.blocks.members.index(block)), ready == self.workers_per_node
            )
        node = self.blocks.node_in(block)
        joining = next((worker for worker in self.live.joining.values() if worker.node == node), None)
        return NodeCandidate(block, joining and self.model_part(joining))

    def model_part(self, worker: WorkerRecord) -> int:
        """Returns a worker's part of the model, by its rank."""
        position, members = worker.rank // self.workers_per_node, worker.size // self.workers_per_node
        return model_part_of(position, members, self.nodes_per_model, worker.partial_model_parts)

    def keeps_model_part(self, worker: WorkerRecord) -> bool:
        """Returns whether a worker's node is a member with the worker's part of the model."""
        block = self.blocks.block_of(worker.node)
        if block is None or block not in self.blocks.members:
            return False
        return self._model_part_at(self.blocks.members.index(block)) == self.model_part(worker)

    def _model_part_at(self, position: int) -> int:
        return model_part_of(position, len(self.blocks.members), self.nodes_per_model, self.partial_model_parts)


@dataclass
class ScaleUp:
    """Progress of adding nodes.

    Attributes:
        assignment: current and possible assignments of nodes to ranks.
        in_progress: whether joining workers were started, or a generation change was requested, since nodes arrived.
        candidates_waited: whether, at the last change of members, connected nodes could train once their workers are
            initialized.
        announced_generation: newest generation whose workers received a scale-up notice; -1 if none.
    """

    assignment: RankAssignment
    in_progress: bool = False
    candidates_waited: bool = False
    announced_generation: int = -1

    def __post_init__(self):
        self._blocks, self._live, self._workers_per_node = (
            self.assignment.blocks,
            self.assignment.live,
            self.assignment.workers_per_node,
        )

    @property
    def more_can_train(self) -> bool:
        """Whether the connected nodes, once initialized, form more model replicas than train now."""
        return len(self.assignment.largest_assignment(self._blocks.filled_blocks)) > self.assignment.nodes_in_copies

    @property
    def all_arrived(self) -> bool:
        """Whether to wait for no more nodes: all rank blocks are filled, or the new nodes have waited already."""
        return self.candidates_waited or len(self._blocks.filled_blocks) == self._blocks.count

    @property
    def joining_workers_are_ready(self) -> bool:
        """Whether joining workers can be included: all are initialized, and more nodes can train with them."""
        joining = self._live.joining.values()
        return bool(joining) and all(worker.is_ready for worker in joining) and bool(self.arrival_reason)

    @property
    def arrival_reason(self) -> GenerationReason | None:
        """Reason to include nodes whose workers can train immediately; None if there are no such nodes."""
        if len(self.assignment.ready_assignment(self.assignment.ready_blocks)) <= self.assignment.nodes_in_copies:
            return None
        if self.candidates_waited:
            return GenerationReason(Cause.NODES_WAITED, "nodes have waited, and are ready")
        return GenerationReason(Cause.NODES_ARRIVED, "nodes have joined")

    @property
    def move_reason(self) -> GenerationReason | None:
        """Reason to move a partial-model node to another part of the model; None if no node moves."""
        moves_member = self.assignment.moves_member(self.assignment.largest_assignment(self._blocks.filled_blocks))
        return (
            GenerationReason(Cause.NODE_MOVES, "a partial-model node moves to another part of the model")
            if moves_member
            else None
        )

    def start_joining_workers(self, generation: int) -> list[Order]:
        """Starts the missing workers of joining nodes, which initialize in the background.

        Joining workers that initialized a different part of the model are killed first.
        """
        blocks = self.assignment.largest_assignment(self._blocks.filled_blocks)
        orders = self._kill(self._initialized_for_another_part(blocks))
        size = len(blocks) * self._workers_per_node
        present = {(worker.node, worker.rank % self._workers_per_node) for worker in self._live.joining.values()}
        for rank in range(size):
            block = blocks[rank // self._workers_per_node]
            node = self._blocks.node_in(block)
            if block in self._blocks.members or node is None or (node, rank % self._workers_per_node) in present:
                continue
            name = self._live.new_name(generation)
            self._live.joining[name] = WorkerRecord(
                name, node, rank, starts_together=False, rank_generation=generation, is_joining=True, size=size
            )
            orders.append(StartWorker(node, name, rank, generation, False, block, size, is_joining=True))
        return orders

    def joining_worker_exited(self, name: str, code: int) -> list[Order]:
        """Handles the exit of a joining worker: kills the joining workers of its node; training continues."""
        node = self._live.joining.pop(name).node
        if code == USAGE:
            self.assignment.refused_sizes.add(len(self.assignment.largest_assignment(self._blocks.filled_blocks)))
        return self._kill([worker for worker in self._live.joining.values() if worker.node == node])

    def _initialized_for_another_part(self, blocks: tuple[int, ...]) -> list[WorkerRecord]:
        """Returns joining workers whose model part differs from their node's in ``blocks``, which are in rank order."""
        parts_by_node = {
            self._blocks.node_in(block): position % self.assignment.nodes_per_model
            for position, block in enumerate(blocks)
        }
        model_parts = {worker.name: self.assignment.model_part(worker) for worker in self._live.joining.values()}
        return [
            joining
            for joining in self._live.joining.values()
            if parts_by_node.get(joining.node, model_parts[joining.name]) != model_parts[joining.name]
        ]

    def _kill(self, workers: Iterable[WorkerRecord]) -> list[Order]:
        return [Kill(worker.node, self._live.joining.pop(worker.name).name) for worker in workers]
